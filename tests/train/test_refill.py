"""Refilling: how many groups are drawn, and that a run which refills resumes to the same bits."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from learner_parts import make_config, trajectory
from whole_runs import assert_same_run, command, metrics_of, run, start, wait_for_step

from agentrl.config import AlgoConfig, RolloutConfig
from agentrl.cursor import ExampleCursor
from agentrl.data import Examples
from agentrl.executors.groups import RolloutGroup, RolloutResult
from agentrl.train.refill import merge_rollouts, sample_until_full
from agentrl.train.selection import select_episodes
from agentrl.types import StopReason, Trajectory


def round_of(groups: dict[str, tuple[float, ...]], dropped: tuple[Trajectory, ...] = ()):
    made = tuple(
        RolloutGroup(name, name, tuple(trajectory(r, group=name, score=r) for r in rewards))
        for name, rewards in groups.items()
    )
    outcomes = tuple(t for group in made for t in group.trajectories)
    failed = {StopReason.ENV_ERROR: len(dropped)} if dropped else {}
    return RolloutResult(made, outcomes + dropped, dropped, len(outcomes), failed, 1, 0, 0.5)


class Sampling:
    """Gives prepared rounds and remembers how many groups each was asked for."""

    def __init__(self, *rounds: RolloutResult) -> None:
        self.rounds, self.asked = list(rounds), []

    async def __call__(self, count: int) -> RolloutResult:
        self.asked.append(count)
        return self.rounds.pop(0)


def refill(sampling: Sampling, *, batch_size: int, max_refills: int = 8) -> RolloutResult:
    rollout = RolloutConfig(batch_size=batch_size, dynamic_sampling=True, max_refills=max_refills)
    return asyncio.run(sample_until_full(sampling, rollout, AlgoConfig()))


def test_what_is_missing_is_drawn_and_no_more():
    sampling = Sampling(
        round_of({"a": (0, 1), "b": (1, 1), "c": (0, 0)}),
        round_of({"d": (1, 1), "e": (0, 1)}),
        round_of({"f": (1, 0)}),
    )
    result = refill(sampling, batch_size=3)
    assert sampling.asked == [3, 2, 1]
    assert [group.group_id for group in result.groups] == list("abcdef")
    assert select_episodes(result.trajectories, AlgoConfig()).trained_groups == {"a", "e", "f"}
    assert "refills" not in result.warnings


def test_a_batch_with_spread_everywhere_is_not_refilled():
    sampling = Sampling(round_of({"a": (0, 1), "b": (2, 1)}))
    refill(sampling, batch_size=2)
    assert sampling.asked == [2]


def test_a_group_that_shaping_alone_separates_is_refilled():
    """The spread is that of the task's score (NeMo-RL#2431)."""
    shaped = tuple(trajectory(r, group="a", score=0.0) for r in (0.1, 0.2))
    first = RolloutResult((RolloutGroup("a", "a", shaped),), shaped, (), 2, {}, 0, 0, 0.1)
    sampling = Sampling(first, round_of({"b": (0, 1)}))
    refill(sampling, batch_size=1)
    assert sampling.asked == [1, 1]


def test_the_limit_ends_the_refilling_with_a_warning_that_says_what_to_do():
    sampling = Sampling(*(round_of({str(i): (1, 1)}) for i in range(3)))
    result = refill(sampling, batch_size=1, max_refills=2)
    assert sampling.asked == [1, 1, 1]
    assert "only 0 of 1 groups" in result.warnings["refills"]
    assert "rollout.max_refills" in result.warnings["refills"]


def test_a_group_that_was_dropped_is_replaced_until_nothing_succeeds():
    lost = trajectory(None, group="b", stop=StopReason.ENV_ERROR)
    rounds = (round_of({"a": (1, 1)}, (lost,)), round_of({}, (lost,)), round_of({"c": (0,)}))
    sampling = Sampling(*rounds)
    rollout = RolloutConfig(batch_size=3)
    result = asyncio.run(sample_until_full(sampling, rollout, AlgoConfig()))
    assert sampling.asked == [3, 2]  # the second round gave nothing: no third
    assert [group.group_id for group in result.groups] == ["a"]
    assert "only 1 of 3 groups have 1 scored episodes" in result.warnings["refills"]


def test_the_end_of_the_data_throws_no_accepted_group_away():
    """OpenRLHF#1310: groups accepted before the loader ended were thrown away with the batch."""
    cursor = ExampleCursor(Examples([{"id": n} for n in range(3)], source="x"), seed=0)
    drawn: list[str] = []

    async def sample(count: int) -> RolloutResult:
        requests = cursor.next_groups(count, 2)
        drawn.extend(request.example_id for request in requests)
        # Of the first pass over the data, only one group has a spread.
        rewards = {r.group_id: (0, int(int(r.group_id) in (1, 3, 4))) for r in requests}
        return round_of(rewards)

    rollout = RolloutConfig(batch_size=2, dynamic_sampling=True)
    result = asyncio.run(sample_until_full(sample, rollout, AlgoConfig()))
    trained = select_episodes(result.trajectories, AlgoConfig()).trained_groups
    assert trained == {"00000001", "00000003"}  # the second is of the next pass
    assert sorted(drawn[:3]) == ["0", "1", "2"]
    assert len(drawn) == 4


def test_rounds_add_up():
    lost = trajectory(None, group="b", stop=StopReason.ENV_ERROR)
    merged = merge_rollouts([round_of({"a": (0, 1)}), round_of({"b": (1,)}, (lost,))])
    assert (merged.num_completed, merged.num_retried, merged.seconds) == (3, 2, 1.0)
    assert merged.num_failed == {StopReason.ENV_ERROR: 1}
    assert len(merged.outcomes) == 4
    assert set(merged.warnings) == {"dropped"}


REFILLING = ("--rollout.dynamic_sampling", "true", "--rollout.max_refills", "3")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    status, _, err = run(command(run_dir, *REFILLING))
    assert status == 0, err
    return run_dir


def test_a_run_refills_its_batches(uninterrupted: Path) -> None:
    lines = metrics_of(uninterrupted)
    assert any(line["group/count"] > 8 for line in lines)
    for line in lines:
        assert line["group/trained"] <= 8
        assert line["group/count"] == line["group/trained"] + line["group/zero_variance"]


def test_a_run_that_refills_resumes_to_the_same_bits(uninterrupted: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(command(run_dir, *REFILLING))
    wait_for_step(run_dir, 3, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    status, _, err = run(command(run_dir, *REFILLING, "--resume"))
    assert status == 0, err
    assert_same_run(run_dir, uninterrupted)


def test_refilling_needs_an_estimator_that_drops_groups() -> None:
    with pytest.raises(ValueError, match=r"use a group estimator .* or set rollout\.dynamic"):
        make_config(
            rollout={"dynamic_sampling": True},
            algo={"advantage": {"estimator": "reinforce_plus_plus"}},
        )
