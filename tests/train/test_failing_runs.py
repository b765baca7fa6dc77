"""Runs of agents that fail, as a user sees them: one message, and no directory in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import metrics_of, run

HEAD = """
import asyncio
import agentrl as rl

def examples(split):
    return [{"id": 0}]

class Agent(rl.AgentInstance):
    def reset(self, example):
        return "go"
"""
GOOD = "    def step(self, action):\n        return rl.StepResult(reward=1.0, done=True)\n"
RAISES = "    def step(self, action):\n        return {}['board']\n"
STUBBORN = """
    async def step(self, action):
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
"""


def command(verb: str, agent: Path, *flags: str) -> list[str]:
    return [
        *("-m", "agentrl", verb, "--agent", str(agent), "--rollout.max_retries", "0"),
        *("--rollout.max_new_tokens", "3", "--rollout.max_tokens", "160", *flags),
    ]


def train(agent: Path, run_dir: Path, *flags: str) -> tuple[int, str]:
    flags = ("--log.run_dir", str(run_dir), "--train.max_steps", "1", *flags)
    small = ("--rollout.batch_size", "1", "--rollout.n_samples_per_prompt", "2")
    status, _, err = run(command("train", agent, *small, *flags))
    return status, err


@pytest.mark.parametrize("verb", ["train", "eval"])
def test_an_agent_that_swallows_its_cancellation_does_not_keep_the_process(
    tmp_path: Path, verb: str
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(HEAD + STUBBORN)
    limits = ("--rollout.step_timeout", "0.2", "--rollout.close_timeout", "0.2")
    limits += ("--rollout.episode_timeout", "0.5", "--train.max_steps", "1")
    status, _, err = run(command(verb, agent, *limits), cwd=tmp_path, timeout=200)
    assert status == 1, err
    assert "must let asyncio.CancelledError pass" in err
    assert "rollout.episode_timeout (0.5 s)" in err
    assert "Traceback" not in err


def test_a_run_that_fails_says_where_in_the_users_file_and_may_begin_again(tmp_path: Path) -> None:
    agent, run_dir = tmp_path / "agent.py", tmp_path / "run"
    agent.write_text(HEAD + "    def __init__(self):\n        raise OSError('no display')\n" + GOOD)
    status, err = train(agent, run_dir)
    assert (status, run_dir.exists()) == (2, False)
    assert "OSError: no display" in err

    agent.write_text(HEAD + RAISES)
    status, err = train(agent, run_dir)
    assert status == 1
    shown = err[err.index("The first failure") :].splitlines()
    assert [line for line in shown if "  File " in line] == [
        f'agentrl:   File "{agent}", line 12, in step'
    ]
    assert shown[-1] == "agentrl: KeyError: 'board'"

    agent.write_text(HEAD + GOOD)
    assert train(agent, run_dir, "--rollout.max_tokens", "1000000")[0] == 2
    status, err = train(agent, run_dir)
    assert status == 0, err
    assert (run_dir / "summary.json").is_file()


def test_an_environment_that_crashes_its_process_costs_its_episode_alone(tmp_path: Path) -> None:
    agent, run_dir = tmp_path / "agent.py", tmp_path / "run"
    crash = f"    def close(self):\n        open({str(tmp_path / 'closed')!r}, 'a').write('x')\n"
    crash += "    def step(self, action):\n        import ctypes, os\n"
    crash += f"        flag = {str(tmp_path / 'crashed')!r}\n"
    crash += "        if not os.path.exists(flag):\n"
    crash += "            open(flag, 'w').close()\n            ctypes.string_at(0)\n"
    crash += "        return rl.StepResult(reward=1.0, done=True)\n"
    agent.write_text(HEAD + crash)
    flags = ("--rollout.env_backend", "process", "--rollout.max_concurrency", "1")
    status, err = train(agent, run_dir, *flags)
    assert status == 0, err
    (line,) = metrics_of(run_dir)
    assert (line["rollout/failed_env_error"], line["rollout/completed"]) == (1, 1)
    assert (tmp_path / "closed").read_text() == "x" * 2  # the episode's, and the probe's


def test_a_run_whose_weights_diverged_at_its_end_fails_and_saves_no_model(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(HEAD + GOOD.replace("1.0", "len(action.text)"))
    run_dir = tmp_path / "run"
    status, err = train(agent, run_dir, "--train.max_steps", "2", "--train.lr", "1e30")
    assert status == 1
    assert "not to be trusted" in err
    assert "Traceback" not in err
    assert not (run_dir / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "warned"), [("grpo", True), ("gae", False)])
def test_equal_rewards_are_warned_of_where_the_estimator_compares_a_group(
    tmp_path: Path, estimator: str, warned: bool
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(HEAD + GOOD)
    flags = ("--log.run_dir", str(tmp_path / "run"), "--train.max_steps", "1")
    flags += ("--rollout.n_samples_per_prompt", "2", "--algo.advantage.estimator", estimator)
    status, out, err = run(command("train", agent, *flags))
    assert status == 0, err
    assert ("this batch teaches nothing" in out) == warned
