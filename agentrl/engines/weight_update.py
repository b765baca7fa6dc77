"""The one order in which weights are replaced, for one engine or for many at once.

    pause -> transfer -> forget every cached prefix -> set the version -> resume

Nothing is sampled between the first and the last step, and nobody else can resume. A failure before
the transfer leaves the old weights in use; a failure after its beginning leaves the engines
refusing requests until an update succeeds, because what they hold is neither version whole.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.engines.base import PauseMode, WeightSource
from agentrl.engines.transport.adapter import AdapterTransport
from agentrl.engines.transport.base import WeightReceiver, WeightTransport
from agentrl.engines.transport.stream import BucketStream
from agentrl.errors import EngineError

__all__ = ["UpdatableEngine", "UpdateSettings", "replace_weights", "update_weights"]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How an update goes; the fields are those of the configuration's section `engine`."""

    pause_mode: PauseMode = "keep"
    bucket_bytes: int = 512 << 20
    timeout: float = 600.0
    """Seconds for the transfer, from its beginning until the new version is set; and for a pause
    that does not wait for requests."""


class UpdatableEngine(WeightReceiver):
    """The steps of an update that an engine offers. Each raises EngineError when it fails."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop sampling; requests in flight are treated as `mode` says."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on sampling."""

    @abstractmethod
    async def flush_cache(self) -> None:
        """Forget every cached prefix, also those of requests that are held."""

    @abstractmethod
    async def forget_prefixes(self, salt: str) -> None:
        """Have no request find a prefix that was cached before, whether or not it stays there.

        From now on requests find prefixes of requests with the same `salt` alone.
        """

    @abstractmethod
    async def set_version(self, version: int) -> None:
        """Label every token sampled from now on with `version`."""

    @abstractmethod
    def hold(self, reason: str) -> None:
        """Hold requests back, and refuse to resume, until `set_version`."""

    @abstractmethod
    async def condemn(self, reason: str) -> None:
        """Refuse requests, and fail those in flight, until an update succeeds."""


async def update_weights(
    engines: Sequence[UpdatableEngine],
    source: WeightSource,
    transport: WeightTransport | AdapterTransport,
    settings: UpdateSettings,
) -> None:
    """Bring `source` into every engine; see the module for order and failures.

    The source is drawn once, to its end, whatever happens: it is a collective of learner ranks.

    Raises:
        EngineError: an engine failed, or the transfer took longer than `settings.timeout` seconds.
    """
    if isinstance(transport, AdapterTransport):
        await replace_weights(engines, transport.send(engines, source), source.version, settings)
        return
    stream = BucketStream(source, settings.bucket_bytes, transport.memory(engines))
    try:
        transfer = transport.send(engines, aiter(stream), source.version)
        await replace_weights(engines, transfer, source.version, settings)
    finally:
        await stream.finish()


async def replace_weights(
    engines: Sequence[UpdatableEngine],
    transfer: Coroutine[Any, Any, None],
    version: int,
    settings: UpdateSettings,
) -> None:
    """The order itself, around any transfer; see the module."""
    try:
        await _pause_all(engines, settings, version)
        for engine in engines:
            engine.hold(f"its update to version {version} has not ended")
        try:
            late = f"the weights of version {version} did not arrive"
            remedy = "raise engine.update_timeout, or try another engine.transport"
            arrival = _transfer(engines, transfer, version)
            await _within(settings.timeout, arrival, late, remedy)
        except BaseException as error:
            reason = f"its update to version {version} failed ({error})"
            await asyncio.gather(*(engine.condemn(reason) for engine in engines))
            raise
    finally:
        transfer.close()  # where the pause failed, it was never begun
    await asyncio.gather(*(engine.resume() for engine in engines))


async def _transfer(
    engines: Sequence[UpdatableEngine], transfer: Coroutine[Any, Any, None], version: int
) -> None:
    await transfer
    salt = uuid.uuid4().hex  # one for all: behind a router a request may reach any of them
    await asyncio.gather(*(engine.forget_prefixes(salt) for engine in engines))
    await asyncio.gather(*(engine.set_version(version) for engine in engines))


async def _pause_all(
    engines: Sequence[UpdatableEngine], settings: UpdateSettings, version: int
) -> None:
    mode = settings.pause_mode
    limit = None if mode == "wait" else settings.timeout
    late = f"an engine did not pause for the weights of version {version}"
    remedy = (
        "see its log, and whether an agent's `async def` blocks, since a request that was admitted "
        "is written to the server first; or raise engine.update_timeout"
    )
    results = await asyncio.gather(
        *(_within(limit, engine.pause(mode), late, remedy) for engine in engines),
        return_exceptions=True,
    )
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        # Also those whose pause failed: they hold requests back. One that an earlier update left
        # half done cannot go on; the pause's own failure counts.
        resuming = (asyncio.wait_for(engine.resume(), settings.timeout) for engine in engines)
        await asyncio.gather(*resuming, return_exceptions=True)
        raise failures[0]


async def _within(
    seconds: float | None, part: Coroutine[Any, Any, None], late: str, remedy: str
) -> None:
    try:
        async with asyncio.timeout(seconds):
            await part
    except TimeoutError as error:
        raise EngineError(f"{late} within {seconds:g} s: {remedy}") from error
