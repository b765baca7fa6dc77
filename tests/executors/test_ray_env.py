"""Environments in actors of a Ray cluster: the same as in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_process_env import closed, make_executor, run

from agentrl.config import DataConfig, RolloutConfig
from agentrl.errors import DependencyError
from agentrl.plugin import load_agent
from agentrl.types import StopReason


def test_without_ray_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DependencyError, match=r"pip install 'agentrl\[ray\]', or set it to proc"):
        make_executor(tmp_path, env_backend="ray")


@pytest.fixture
def cluster() -> Iterator[None]:
    """Ray's processes end with the test."""
    import ray

    yield
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.parametrize("coroutines", [False, True])
async def test_what_breaks_in_an_actor_is_its_episodes_failure_alone(
    cluster: None, tmp_path: Path, coroutines: bool
) -> None:
    executor = make_executor(
        tmp_path, env_backend="ray", coroutines=coroutines, max_retries=0, step_timeout=20.0
    )
    does = ["play", "exit", "raise", "unpicklable", "play"]
    result = await run(executor, tmp_path, *does)
    assert result.num_completed == 2
    assert result.num_failed == {StopReason.ENV_ERROR: 3}
    end, error, value = (t.error or "" for t in result.dropped)
    assert "the environment's actor died during step" in end
    assert "ValueError: no such move" in error
    assert "cannot travel between processes" in value
    assert len({t.metrics["pid"] for t in result.trajectories}) == 2
    assert len(closed(tmp_path)) == 4


@pytest.mark.ray
async def test_an_actor_that_hangs_is_killed_while_others_go_on(
    cluster: None, tmp_path: Path
) -> None:
    executor = make_executor(
        tmp_path, env_backend="ray", max_retries=0, step_timeout=3.0, close_timeout=0.5
    )
    result = await run(executor, tmp_path, "play", "spin")
    assert result.num_completed == 1
    assert result.num_failed == {StopReason.TIMEOUT: 1}


@pytest.mark.ray
async def test_a_coroutine_of_an_actor_that_hangs_is_cancelled_and_closed(
    cluster: None, tmp_path: Path
) -> None:
    executor = make_executor(
        tmp_path, env_backend="ray", coroutines=True, max_retries=0, step_timeout=3.0
    )
    result = await run(executor, tmp_path, "play", "wait")
    assert result.num_failed == {StopReason.TIMEOUT: 1}
    assert len(closed(tmp_path)) == 2


@pytest.mark.ray
def test_the_probe_before_a_run_builds_an_instance_in_an_actor(
    cluster: None, tmp_path: Path
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        "import agentrl as rl\nclass Env(rl.AgentInstance):\n"
        "    def __init__(self):\n        raise OSError('no display')\n"
    )
    with pytest.raises(Exception, match="no display"):
        load_agent(path).make_executor(RolloutConfig(env_backend="ray"), DataConfig())
