"""One episode's instance in a process of its own: what breaks there breaks nothing else.

A process that dies is the environment's error, with the signal that ended it. One that does not
answer is given `rollout.close_timeout` to return and `close`, while its episode goes on without it,
and is then killed with everything that it started. Every episode has a fresh process, so that what
an environment leaks is gone with its episode.
"""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.config import RolloutConfig
from agentrl.executors.close_faults import CloseFaults
from agentrl.executors.process.places import EnvHost, EnvPlace
from agentrl.executors.timed_calls import TimedCalls
from agentrl.types import Action

__all__ = ["ProcessRunner"]


class ProcessRunner:
    """One episode's instance; the same calls as `InstanceRunner`.

    Args:
        host: forks the process.
        class_name: of the instance, for messages.
        rollout: the time limits.
        name: of the episode, for messages.
        close_faults: of the run, told what `close` does wrong.
    """

    def __init__(
        self,
        host: EnvHost,
        class_name: str,
        rollout: RolloutConfig,
        *,
        name: str,
        close_faults: CloseFaults,
    ) -> None:
        self._host = host
        self._close_timeout = rollout.close_timeout
        self._calls = TimedCalls(class_name, rollout, name, close_faults)
        self._process: EnvPlace | None = None
        self._is_built = False

    @property
    def seconds(self) -> float:
        """Spent in the instance so far."""
        return self._calls.seconds

    async def build(self) -> None:
        """Fork the process and build the instance there.

        Raises:
            AgentTimeoutError: that took longer than `rollout.reset_timeout`.
            AgentError: the process died.
        """
        await self._calls.limit(self._build(), "__init__")

    async def reset(self, *args: Any) -> Any:
        """Call `reset`; its value. Raises as `build` does."""
        return await self._call("reset", *args)

    async def step(self, action: Action | dict[str, Any]) -> Any:
        """Call `step`; its value.

        Raises:
            AgentTimeoutError: it took longer than `rollout.step_timeout`.
            AgentError: the process died.
        """
        return await self._call("step", action)

    async def close(self) -> None:
        """Close the instance, if it was built, and end its process. Called once."""
        process = self._process
        if process is None:
            return
        if self._calls.hung:
            self._host.retire(process, self._close_timeout)
            return
        try:
            if self._is_built and not process.has_ended:
                await self._calls.finish(asyncio.ensure_future(process.call("close")))
        finally:
            process.kill()

    async def _build(self) -> None:
        self._process = await self._host.fork()
        await self._process.call("__init__")
        self._is_built = True

    async def _call(self, method: str, *args: Any) -> Any:
        assert self._process is not None, "build comes first"
        return await self._calls.limit(self._process.call(method, *args), method)
