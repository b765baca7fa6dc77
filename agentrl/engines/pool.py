"""Many engines as one: routed, updated together, and replaced when they die.

A request of an engine that dies fails with EngineError, and the scheduler runs its episode again.
The engine is started anew and given the newest weights: out of their folder if they travel by
disk, or drawn again if the learner's tensors are at hand (`WeightSource.live`). Otherwise it waits
for the next update, and the others serve alone until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from agentrl.engines.answer import Place
from agentrl.engines.base import Engine, PauseMode, WeightSource
from agentrl.engines.engine_stats import Answer, EngineCounts
from agentrl.engines.head_padding import HeadPadding
from agentrl.engines.remote import DEATH_SECONDS, RemoteEngine, Send
from agentrl.engines.routing import Router
from agentrl.engines.transport.adapter import AdapterTransport
from agentrl.engines.transport.base import WeightTransport
from agentrl.engines.transport.disk import DiskTransport
from agentrl.engines.weight_update import UpdateSettings, replace_weights, update_weights
from agentrl.errors import EngineError
from agentrl.types import Generation, SamplingParams

__all__ = ["EnginePool"]

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Answer)


class EnginePool(Engine):
    """Routes requests to engines and keeps them at one version.

    Args:
        engines: At least one; the pool starts and closes them.
        transport: How weights travel to all of them at once.
        update: How an update goes.
        max_restarts: How often one server is started again.
        padding: What the servers need done to the weights.
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        transport: WeightTransport | AdapterTransport,
        update: UpdateSettings = UpdateSettings(),  # noqa: B008
        *,
        max_restarts: int = 3,
        padding: HeadPadding | None = None,
    ) -> None:
        self.engines = tuple(engines)
        self._transport = transport
        self._update = update
        self._padding = padding
        self._router = Router(
            [
                (engine, replica if engine.replicas > 1 else None)
                for engine in self.engines
                for replica in range(engine.replicas)
            ]
        )
        self._restarts_left = dict.fromkeys(self.engines, max_restarts)
        self._newest: WeightSource | None = None
        self._updating = asyncio.Lock()
        self._reviving: dict[RemoteEngine, asyncio.Task[None]] = {}
        self._closed = False
        self._update_comes = False
        """Whether the learner makes new weights, which surely come."""
        self._engines_changed = asyncio.Event()
        """Set, and replaced, when a request that found no engine may look again."""
        self._watchers: list[asyncio.Task[None]] = []
        self.version_listeners: list[Callable[[int], None]] = []
        """Told of each version when all engines sample from it."""

    @property
    def weight_version(self) -> int:
        """The version of the last update that succeeded."""
        return self._newest.version if self._newest is not None else 0

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and response together, that one request may hold."""
        return min(engine.max_model_len for engine in self.engines)

    @property
    def repeats(self) -> bool:
        """False: the numerics of a server depend on what it samples at the same time."""
        return False

    async def start(self) -> None:
        """Start every engine; if one fails, end the others."""
        try:
            async with asyncio.TaskGroup() as starting:
                for engine in self.engines:
                    starting.create_task(engine.start())
        except BaseExceptionGroup as group:
            await self.close()
            raise group.exceptions[0] from None
        self._watchers = [asyncio.create_task(self._watch(engine)) for engine in self.engines]

    async def close(self) -> None:
        """End every engine, also one that is being started again; whoever waits gets an error."""
        self._closed = True
        self._let_requests_look()
        for task in (*self._watchers, *self._reviving.values()):
            task.cancel()
        await asyncio.gather(*self._watchers, *self._reviving.values(), return_exceptions=True)
        await self._transport.close()
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        rollout_id: str = "",
        group_id: str = "",
    ) -> Generation:
        """Sample a continuation where its prefix is most likely cached; see `Engine.generate`."""
        tokens = len(token_ids) + params.max_new_tokens
        engine, replica = slot = await self._take_slot(rollout_id, group_id, tokens)
        try:
            return await engine.generate(
                token_ids, params, rollout_id=rollout_id, group_id=group_id, replica=replica
            )
        finally:
            self._router.end(slot, tokens)

    async def request(
        self,
        send: Send[A],
        prompt_tokens: int,
        max_new_tokens: int,
        *,
        rollout_id: str = "",
        group_id: str = "",
    ) -> A:
        """Have a request sent by somebody else, where its prefix is most likely cached; see
        `RemoteEngine.request`."""
        tokens = prompt_tokens + max_new_tokens
        engine, replica = slot = await self._take_slot(rollout_id, group_id, tokens)
        try:
            place = Place(replica, rollout_id, group_id)
            return await engine.request(send, prompt_tokens, place)
        finally:
            self._router.end(slot, tokens)

    async def _take_slot(
        self, rollout_id: str, group_id: str, tokens: int
    ) -> tuple[RemoteEngine, int | None]:
        """The engine and replica that a request of `tokens` tokens goes to, and has from now on."""
        while not (usable := [slot for slot in self._router.slots if self._serves(slot[0])]):
            await self._wait_for_an_engine()
        slot = self._router.choose(usable, rollout_id, group_id, tokens)
        self._router.begin(slot, tokens)
        return slot

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Pause every engine."""
        await asyncio.gather(*(engine.pause(mode) for engine in await self._living()))

    async def resume(self) -> None:
        """Resume every engine."""
        await asyncio.gather(*(engine.resume() for engine in await self._living()))

    async def update_weights(self, source: WeightSource) -> None:
        """Bring new weights into every living engine; see `weight_update`.

        Where a server dies in it they are drawn again, for those that are left or brought back.

        Raises:
            EngineError: it failed; the engines refuse requests until an update succeeds.
        """
        if (padding := self._padding) is not None:
            draw = source.named_weights
            source = replace(source, named_weights=lambda: padding.weights(draw()))
        try:
            await self._update_living(source)
        finally:
            self._update_comes = False
            self._let_requests_look()
        for tell in self.version_listeners:
            tell(source.version)

    async def _update_living(self, source: WeightSource) -> None:
        while True:
            await self._living()
            async with self._updating:
                # Those of now: one may have come back, and others died, until the lock was free.
                if living := self._alive():
                    ends = [each.server.died for each in living if each.server is not None]
                    try:
                        await update_weights(living, source, self._transport, self._update)
                    except EngineError as error:
                        if not await _any_of(ends, DEATH_SECONDS):
                            raise
                        logger.warning("the update goes on without a server that died: %s", error)
                        continue
                    self._newest = source
                    return

    async def weights_will_change(self) -> None:
        """A server that starts again from now on waits for the next update, and requests for it."""
        self._update_comes = True
        async with self._updating:
            if self._newest is not None:
                self._newest = replace(self._newest, live=False)

    async def flush_cache(self) -> None:
        """Forget every cached prefix."""
        await asyncio.gather(*(engine.flush_cache() for engine in await self._living()))

    async def sleep(self, level: int = 1) -> None:
        """Give device memory back everywhere."""
        await asyncio.gather(*(engine.sleep(level) for engine in await self._living()))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take device memory again everywhere."""
        await asyncio.gather(*(engine.wake(tags) for engine in await self._living()))

    def stats(self) -> Mapping[str, float]:
        """Metrics over all engines since the last call, as if they were one."""
        counts = (engine.take_counts() for engine in self.engines)
        return sum(counts, EngineCounts()).metrics()

    async def refresh_stats(self) -> None:
        """Read the metrics of every server that lives."""
        await asyncio.gather(
            *(engine.refresh_stats() for engine in self.engines if not engine.dead)
        )

    async def _living(self) -> list[RemoteEngine]:
        """The engines that live; where none does, those that are brought back first."""
        while not (living := self._alive()):
            if self._closed or not self._awaited():
                raise EngineError("no engine is alive: see the logs in the run's folder `engines`")
            await self._engines_changed.wait()
        return living

    def _alive(self) -> list[RemoteEngine]:
        return [e for e in self.engines if not e.dead and e not in self._reviving]

    async def settled(self) -> None:
        """Wait until no dead engine is being replaced."""
        while self._awaited():
            await self._engines_changed.wait()

    def _serves(self, engine: RemoteEngine) -> bool:
        return not engine.dead and engine not in self._reviving and engine.condemned is None

    def _awaited(self) -> list[RemoteEngine]:
        """Engines that are being replaced, or will be as soon as their watcher runs."""
        return [
            engine
            for engine in self.engines
            if engine in self._reviving or (engine.dead and self._restarts_left[engine] > 0)
        ]

    async def _wait_for_an_engine(self) -> None:
        if self._closed or not (self._awaited() or self._update_comes):
            reasons = {engine.condemned or "its server has died" for engine in self.engines}
            raise EngineError(f"no engine takes requests: {'; '.join(sorted(reasons))}")
        await self._engines_changed.wait()

    def _let_requests_look(self) -> None:
        changed, self._engines_changed = self._engines_changed, asyncio.Event()
        changed.set()

    async def _watch(self, engine: RemoteEngine) -> None:
        """Start `engine` again whenever its server dies."""
        if engine.server is None:
            return
        while self._restarts_left[engine] > 0:
            await engine.server.died.wait()
            self._restarts_left[engine] -= 1
            revival = asyncio.create_task(self._revive(engine))
            self._reviving[engine] = revival
            try:
                await revival
            except EngineError as error:
                logger.error("%s was not brought back: %s", engine.label, error)
            except Exception:  # a watcher that ended would leave whoever waits for it waiting
                logger.exception("%s was not brought back", engine.label)
            finally:
                self._reviving.pop(engine, None)
                self._let_requests_look()

    async def _revive(self, engine: RemoteEngine) -> None:
        await engine.restart()
        async with self._updating:
            await self._bring_newest(engine)
            del self._reviving[engine]  # before an update that waits for the lock looks

    async def _bring_newest(self, engine: RemoteEngine) -> None:
        if self._newest is None:
            await engine.set_version(0)
            await engine.resume()
            return
        version = self._newest.version
        transport = self._transport
        if isinstance(transport, DiskTransport | AdapterTransport) and transport.newest:
            loading = transport.load_newest(engine)
            await replace_weights([engine], loading, version, self._update)
        elif self._newest.live:
            await update_weights([engine], self._newest, self._transport, self._update)
        else:
            logger.warning("%s lives again and waits for the next weights", engine.label)


async def _any_of(events: Sequence[asyncio.Event], seconds: float) -> bool:
    """Whether one of the events is set, or will be within so many seconds."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    if not waits:
        return False
    try:
        first = asyncio.FIRST_COMPLETED
        return bool((await asyncio.wait(waits, timeout=seconds, return_when=first))[0])
    finally:
        for wait in waits:
            wait.cancel()
