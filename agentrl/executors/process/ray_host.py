"""Environments as actors of a Ray cluster, a new one for each episode.

Ray runs where `RAY_ADDRESS` says, or else on this machine, until the process ends. Every node needs
agentrl and the agent's file at the same path. An actor takes no CPU of Ray's account: how many run
at once is for `rollout.max_concurrency` to say, and Ray spreads them over the nodes.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import Future
from typing import Any

from agentrl.errors import AgentError, DependencyError
from agentrl.executors.process.child import METHODS, call_on_loop, call_without_loop
from agentrl.executors.process.frames import Outcome, take_frames
from agentrl.executors.process.places import EnvHost, EnvPlace
from agentrl.executors.process.recipe import Recipe

__all__ = ["RayHost"]


class PlainActor:
    """An instance whose methods are all plain."""

    def __init__(self, recipe: Recipe) -> None:
        instance_class = recipe.load()
        self._instance = instance_class.__new__(instance_class)

    def call(self, method: str, arguments: tuple[Any, ...]) -> bytes:
        """Call a method; its outcome, as a frame."""
        return call_without_loop(self._instance, method, arguments).to_bytes()


class LoopActor(PlainActor):
    """An instance with coroutines, which run on the actor's event loop."""

    async def call(self, method: str, arguments: tuple[Any, ...]) -> bytes:  # type: ignore[override]
        """Call a method; its outcome, as a frame."""
        return (await call_on_loop(self._instance, method, arguments)).to_bytes()


class RayPlace(EnvPlace):
    """One actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether it is known to be dead."""
        return self._has_ended

    async def call(self, method: str, *arguments: Any) -> Any:
        """As `EnvPlace.call` says."""
        answer = self._actor.call.remote(method, arguments)
        try:
            frame = await answer
        except asyncio.CancelledError:
            self._ray.cancel(answer)
            raise
        except self._ray.exceptions.RayActorError as error:
            self._has_ended = True
            raise AgentError(f"the environment's actor died during {method}: {error}") from error
        outcome: Outcome
        (outcome,) = take_frames(bytearray(frame))
        return outcome.result()

    def kill(self) -> None:
        """End the actor's process."""
        self._ray.kill(self._actor)


class RayHost(EnvHost):
    """Makes actors for one agent's environments.

    Raises:
        DependencyError: ray is not installed.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        try:
            import ray
        except ImportError as error:
            raise DependencyError(
                "rollout.env_backend ray needs the package ray: pip install 'agentrl[ray]', or set "
                "it to process"
            ) from error
        self._ray, self._recipe = ray, recipe
        methods = (getattr(recipe.load(), name) for name in METHODS)
        kind = LoopActor if any(map(inspect.iscoroutinefunction, methods)) else PlainActor
        self._actors = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(kind)
        self._starting = asyncio.Lock()

    async def fork(self) -> EnvPlace:
        """Place an actor on some node."""
        async with self._starting:
            if not self._ray.is_initialized():
                await asyncio.wrap_future(_start(self._ray))
        return RayPlace(self._ray, self._actors.remote(self._recipe))


def _start(ray: Any) -> Future[None]:
    """Connect to Ray, or start it, in a thread that ends with the process.

    What Ray starts ends with the thread that started it, so that it can be none that comes and
    goes; and in the main thread Ray would take the handlers of signals.
    """
    started: Future[None] = Future()

    def run() -> None:
        try:
            ray.init(configure_logging=False)
        except Exception as error:  # noqa: BLE001 - handed to the episode that awaits it
            started.set_exception(AgentError(f"Ray could not be started: {error}"))
            return
        started.set_result(None)
        threading.Event().wait()

    threading.Thread(target=run, name="ray", daemon=True).start()
    return started
