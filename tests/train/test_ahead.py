"""Groups that are sampled ahead: nothing is lost, nothing is older than allowed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.config import TrainConfig
from agentrl.errors import EngineError
from agentrl.executors.groups import GroupRequest, RolloutGroup, RolloutResult
from agentrl.train.ahead import RolloutsAhead
from agentrl.train.buffer import load_finished, save_finished
from agentrl.train.stale import drop_stale, oldest_trained, stale_metrics, staleness_metrics
from agentrl.types import Sequence, StopReason, Trajectory, Turn


def trajectory(group_id: str, versions: list[int] | None = None) -> Trajectory:
    """One episode: a prompt token, then one sampled token for each version."""
    versions = versions or [0]
    size = 1 + len(versions)
    sequence = Sequence(
        token_ids=list(range(size)),
        response_mask=[False] + [True] * (size - 1),
        logprobs=None,
        weight_versions=[-1, *versions],
        turns=(Turn(start=1, end=size, finish_reason="stop"),),
    )
    return Trajectory((sequence,), 1.0, StopReason.DONE, group_id=group_id, rollout_id=group_id)


def result(
    group_id: str, *, usable: bool = True, versions: list[int] | None = None
) -> RolloutResult:
    episode = trajectory(group_id, versions)
    groups = (RolloutGroup(group_id, group_id, (episode,)),) if usable else ()
    return RolloutResult(groups, (episode,), (), 1, {}, 0, 0 if usable else 1, 1.0)


async def quiet() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Sampling:
    """Groups that end when they are told to, or fail."""

    def __init__(self) -> None:
        self.ends: dict[str, asyncio.Future[RolloutResult]] = {}
        self.drawn = 0

    def draw(self) -> GroupRequest:
        self.drawn += 1
        return GroupRequest(f"{self.drawn - 1:03d}", "example", {}, 1)

    async def sample(self, request: GroupRequest) -> RolloutResult:
        self.ends[request.group_id] = asyncio.get_running_loop().create_future()
        return await self.ends[request.group_id]

    async def end(self, *group_ids: str, usable: bool = True) -> None:
        await quiet()
        for group_id in group_ids:
            self.ends[group_id].set_result(result(group_id, usable=usable))
            await quiet()

    def ahead(
        self, *, max_staleness: int = 1, batch_size: int = 2, **options: object
    ) -> RolloutsAhead:
        return RolloutsAhead(
            self.sample,
            self.draw,
            lambda group: bool(group.groups),
            lambda missing: {"refills": f"{missing} missing"} if missing else {},
            batch_size=batch_size,
            max_staleness=max_staleness,
            max_refills=3,
            **options,  # type: ignore[arg-type]
        )


def ids(batch: RolloutResult) -> list[str]:
    return [outcome.group_id for outcome in batch.outcomes]


async def test_a_batch_takes_the_groups_that_are_done_first_and_leaves_the_rest_running() -> None:
    sampling = Sampling()
    ahead = sampling.ahead()
    batch = asyncio.create_task(ahead.next_batch(0, steps_left=10))
    await sampling.end("003", "001")
    assert ids(await batch) == ["001", "003"]
    assert ahead.unfinished == ["000", "002"]
    assert ahead.metrics(1) == {
        "ahead/finished_groups": 0,
        "ahead/running_groups": 2,
        "ahead/oldest": 1,
    }
    await ahead.close()


async def test_a_group_as_old_as_allowed_is_waited_for() -> None:
    sampling = Sampling()
    ahead = sampling.ahead()
    first = asyncio.create_task(ahead.next_batch(0, steps_left=10))
    await sampling.end("003", "001")
    await first
    second = asyncio.create_task(ahead.next_batch(1, steps_left=9))
    await sampling.end("004", "005")  # begun under version 1: they have time
    assert not second.done()
    await sampling.end("002", "000")
    assert ids(await second) == ["000", "002"]
    metrics = ahead.metrics(1)
    assert (metrics["ahead/finished_groups"], metrics["ahead/waiting_length"]) == (2, 1.0)
    third = await ahead.next_batch(2, steps_left=8)
    assert ids(third) == ["004", "005"]
    await ahead.close()


async def test_a_group_that_does_not_fill_its_batch_is_replaced() -> None:
    sampling = Sampling()
    ahead = sampling.ahead()
    batch = asyncio.create_task(ahead.next_batch(0, steps_left=10))
    await sampling.end("000", usable=False)
    await sampling.end("001", "004")  # 004 was begun in the place of 000
    assert ids(await batch) == ["000", "001", "004"]
    await ahead.close()


async def test_a_batch_that_nothing_fills_is_given_up() -> None:
    sampling = Sampling()
    ahead = sampling.ahead(batch_size=1)
    batch = asyncio.create_task(ahead.next_batch(0, steps_left=10))
    for number in range(4):
        await sampling.end(f"{number:03d}", usable=False)
    assert (await batch).groups == ()
    assert (await batch).warnings["refills"] == "1 missing"
    await ahead.close()


async def test_a_batch_that_nothing_fills_is_not_given_up_before_it_holds_what_is_due() -> None:
    sampling = Sampling()
    ahead = sampling.ahead()  # a batch is given up when it holds 8 groups
    first = asyncio.create_task(ahead.next_batch(0, steps_left=10))
    await sampling.end("001", "002")
    await first
    second = asyncio.create_task(ahead.next_batch(1, steps_left=9))
    for number in range(3, 11):
        await sampling.end(f"{number:03d}", usable=False)
    assert not second.done()
    await sampling.end("000", usable=False)
    assert ids(await second) == ["000", *(f"{number:03d}" for number in range(3, 10))]
    await ahead.close()


async def test_no_more_is_sampled_than_the_run_needs() -> None:
    sampling = Sampling()
    ahead = sampling.ahead(max_staleness=3)
    for step in range(3):
        batch = asyncio.create_task(ahead.next_batch(step, steps_left=3 - step))
        await sampling.end(f"{2 * step:03d}", f"{2 * step + 1:03d}")
        await batch
    assert sampling.drawn == 6
    assert ahead.unfinished == []
    assert ahead.finished == []


@pytest.mark.parametrize("max_staleness", [1, 2, 5])
async def test_every_group_is_in_one_batch_and_none_is_too_old(max_staleness: int) -> None:
    """OpenRLHF#1320: the tail of what was sampled beyond a batch was cleared."""
    order = random.Random(max_staleness)
    begun: dict[str, int] = {}
    version = 0

    async def sample(request: GroupRequest) -> RolloutResult:
        begun[request.group_id] = version
        for _ in range(order.choice([1, 1, 1, 40])):
            await asyncio.sleep(0)
        return result(request.group_id, usable=order.random() < 0.8)

    sampling = Sampling()
    sampling.sample = sample  # type: ignore[method-assign]
    ahead = sampling.ahead(max_staleness=max_staleness, batch_size=4)
    taken: list[str] = []
    for version in range(50):
        batch = await ahead.next_batch(version, steps_left=50 - version)
        assert len(batch.groups) == 4
        assert max(version - begun[group_id] for group_id in ids(batch)) <= max_staleness
        taken += ids(batch)
    left = ahead.unfinished + [group.group_id for group in ahead.finished]
    assert sorted(taken + left) == [f"{number:03d}" for number in range(sampling.drawn)]
    await ahead.close()


async def test_a_failure_ends_the_batch_and_closing_ends_what_runs() -> None:
    sampling = Sampling()
    ahead = sampling.ahead()
    batch = asyncio.create_task(ahead.next_batch(0, steps_left=10))
    await quiet()
    sampling.ends["002"].set_exception(EngineError("the engine is gone"))
    with pytest.raises(EngineError, match="the engine is gone"):
        await batch
    await ahead.close()
    assert all(end.done() for end in sampling.ends.values())


async def test_the_seconds_of_a_batch_begin_with_the_one_before_and_not_with_the_engines_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("agentrl.train.ahead.time", SimpleNamespace(perf_counter=lambda: clock.now))
    sampling = Sampling()
    ahead = sampling.ahead(batch_size=1)
    seconds = []
    for number, (begin, end) in enumerate([(100.0, 102.0), (105.0, 109.0)]):
        clock.now = begin
        batch = asyncio.create_task(ahead.next_batch(number, steps_left=10))
        await quiet()
        clock.now = end
        await sampling.end(f"{number:03d}")
        seconds.append((await batch).seconds)
    assert seconds == [2.0, 7.0]
    await ahead.close()


async def test_a_batch_that_does_not_wait_leaves_what_is_older_than_allowed_running() -> None:
    sampling = Sampling()
    ahead = sampling.ahead(waits=False)
    for version, ends in enumerate([("003", "001"), ("004", "005"), ("006", "007")]):
        batch = asyncio.create_task(ahead.next_batch(version, steps_left=10))
        await sampling.end(*ends)
        assert ids(await batch) == sorted(ends)
    assert ahead.unfinished == ["000", "002"]
    assert ahead.metrics(3)["ahead/oldest"] == 3
    await ahead.close()


async def test_a_group_that_is_too_old_as_a_whole_is_replaced() -> None:
    sampling = Sampling()
    ahead = sampling.ahead(
        waits=False, batch_size=1, admit=lambda group, version: drop_stale(group, version - 1, 1)
    )
    batch = asyncio.create_task(ahead.next_batch(2, steps_left=10))
    await sampling.end("000")  # its tokens are of version 0
    sampling.ends["001"].set_result(result("001", versions=[0, 1]))
    await quiet()
    sampling.ends["002"].set_result(result("002", versions=[1, 2]))
    taken = await batch
    assert ids(taken) == ["000", "001", "002"]
    assert [group.group_id for group in taken.groups] == ["002"]
    assert taken.num_dropped_groups == 2
    await ahead.close()


async def test_finished_groups_go_through_a_checkpoint_in_their_order(tmp_path: Path) -> None:
    """OpenRLHF#1322: what was sampled and in no batch yet was lost on resume."""
    sampling = Sampling()
    ahead = sampling.ahead(max_staleness=2)
    batch = asyncio.create_task(ahead.next_batch(0, steps_left=10))
    await sampling.end("003", "001", "005")
    await sampling.end("000", usable=False)
    await batch
    save_finished(tmp_path, 1, ahead.finished)
    again = ahead.unfinished
    await ahead.close()
    assert again == ["002", "004"]

    resumed = Sampling()
    resumed.drawn = 6
    restored = resumed.ahead(max_staleness=2)
    restored.restore(load_finished(tmp_path, 1))
    assert [(group.group_id, group.version) for group in restored.finished] == [
        ("005", 0),
        ("000", 0),
    ]
    batch = asyncio.create_task(restored.next_batch(1, steps_left=9))
    await resumed.end("007")
    taken = await batch
    assert ids(taken) == ["000", "005", "007"]
    assert taken.groups[0].trajectories[0].sequences[0].token_ids.tolist() == [0, 1]
    assert (taken.num_completed, taken.num_dropped_groups) == (3, 1)
    await restored.close()


async def test_groups_whose_sampling_failed_are_drawn_again() -> None:
    sampling = Sampling()
    ahead = sampling.ahead()
    batch = asyncio.create_task(ahead.next_batch(0, steps_left=10))
    await quiet()
    sampling.ends["002"].set_exception(EngineError("the engine is gone"))
    with pytest.raises(EngineError):
        await batch
    assert ahead.unfinished == ["000", "001", "003"]  # 002 was taken, and ended the run
    await ahead.close()


def test_a_checkpoint_without_finished_groups_restores_none(tmp_path: Path) -> None:
    assert load_finished(tmp_path, 1) == []
    save_finished(tmp_path, 1, [])
    assert load_finished(tmp_path, 1) == []


def test_episodes_with_a_token_that_is_too_old_leave_their_group() -> None:
    episodes = (trajectory("g", [5, 6]), trajectory("g", [3, 6]), trajectory("g", [4, 4]))
    group = RolloutResult((RolloutGroup("g", "g", episodes),), episodes, (), 3, {}, 0, 0, 1.0)
    kept = drop_stale(group, 4, min_group_size=2)
    assert kept.groups[0].trajectories == (episodes[0], episodes[2])
    assert (kept.outcomes, kept.num_dropped_groups) == (episodes, 0)
    assert drop_stale(group, 5, min_group_size=2).groups == ()
    assert drop_stale(group, 5, min_group_size=2).num_dropped_groups == 1
    assert drop_stale(group, 5, min_group_size=1).groups[0].trajectories == (episodes[0],)


def test_what_is_done_about_old_tokens_is_in_the_metrics() -> None:
    episodes = (trajectory("g", [5, 6]), trajectory("g", [3, 4, 6]))
    group = RolloutResult((RolloutGroup("g", "g", episodes),), episodes, (), 2, {}, 0, 0, 1.0)
    assert stale_metrics(group, 3, "wait") == {}
    assert stale_metrics(group, 5, "wait") == {"staleness/masked_share": 0.4}
    assert stale_metrics(group, 5, "mask") == {"staleness/masked_share": 0.4}
    assert stale_metrics(group, 5, "keep") == {"staleness/kept_share": 0.4}
    assert stale_metrics(group, 5, "drop") == {
        "staleness/dropped_episodes": 1.0,
        "staleness/dropped_length": 3.0,
    }


@pytest.mark.parametrize(
    ("stale", "max_staleness", "oldest"),
    [("wait", 2, 5), ("mask", 1, 6), ("keep", 1, None), ("drop", 1, None), ("wait", 0, None)],
)
def test_which_tokens_give_no_gradient_for_their_age(
    stale: str, max_staleness: int, oldest: int | None
) -> None:
    train = TrainConfig(stale=stale, max_staleness=max_staleness)
    assert oldest_trained(7, train) == oldest


def test_staleness_is_counted_in_tokens() -> None:
    episodes = [trajectory("a", [4, 4, 5]), trajectory("b", [3])]
    assert staleness_metrics(episodes, 5) == {"staleness/mean": 1.0, "staleness/max": 2.0}
    assert staleness_metrics([], 5) == {}
