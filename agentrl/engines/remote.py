"""What engines over HTTP share; `vllm` and `sglang` say how each server is spoken to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import httpx
import torch

from agentrl.engines import prometheus
from agentrl.engines.answer import Place
from agentrl.engines.base import Engine, PauseMode, WeightSource
from agentrl.engines.engine_stats import Answer, EngineCounts, EngineStats, MetricNames
from agentrl.engines.gate import RequestGate
from agentrl.engines.http import EngineClient, NoAnswerError, RequestRefusedError
from agentrl.engines.request_check import EngineLimits
from agentrl.engines.server import EngineServer
from agentrl.engines.siblings import Sibling
from agentrl.engines.token_route import Permit, TokenRoute
from agentrl.engines.transport.adapter import AdapterTransport
from agentrl.engines.transport.base import WeightTransport
from agentrl.engines.weight_update import UpdatableEngine, UpdateSettings, update_weights
from agentrl.errors import EngineError
from agentrl.types import Generation, SamplingParams

__all__ = ["DEATH_SECONDS", "RemoteEngine", "Send"]

logger = logging.getLogger(__name__)

ABORT_SECONDS = 10.0
METRICS_INTERVAL = 2.0
"""Seconds between two readings of the server's metrics while requests are in flight."""
METRICS_SECONDS = 10.0
DEATH_SECONDS = 3.0
"""How long after a broken connection the end of the server process is waited for."""


A = TypeVar("A", bound=Answer)

Send = Callable[[Permit, Callable[[], None]], Awaitable[A]]
"""Sends one request with a permit, calls the second argument when it is written, and gives what
came of it. Raises EngineError."""


class RemoteEngine(Engine, UpdatableEngine):
    """One server: started by agentrl (`server`) or running already (`url`).

    Args:
        server: The process to start, or
        url: the address of one that runs.
        limits: Context, concurrency and time limits of requests.
        transport: How weights travel when this engine is updated by itself.
        update: How an update goes.
        api_key: Sent with every request.
        replicas: Data-parallel replicas inside the server, each with its own prefix cache.
        num_weight_ranks: Processes of the server that hold weights.
        memory_device: The GPU whose memory the server can open; None: any.
    """

    token_route: ClassVar[type[TokenRoute]]
    metric_names: ClassVar[MetricNames]

    def __init__(
        self,
        *,
        limits: EngineLimits,
        transport: WeightTransport | AdapterTransport,
        server: EngineServer | None = None,
        url: str | None = None,
        update: UpdateSettings = UpdateSettings(),  # noqa: B008
        api_key: str | None = None,
        replicas: int = 1,
        num_weight_ranks: int = 1,
        memory_device: torch.device | None = None,
    ) -> None:
        if (server is None) == (url is None):
            raise ValueError("an engine has either a server to start or the url of one")
        self.server = server
        self.replicas = replicas
        self._url = url or ""
        self.route = self.token_route(limits)
        self._transport = transport
        self._update = update
        self._api_key = api_key
        self._num_weight_ranks = num_weight_ranks
        self._memory_device = memory_device
        self._incarnation = 0
        self._version = 0
        self._takes_labels = True
        """Whether the server knows versions, as far as it has said."""
        self._adapter: str | None = None
        """What the server calls the LoRA adapter that is sampled with, if there is one."""
        self._asleep: set[str] = set()
        self._paused = False
        """Whether the server was told to pause, and not yet to go on."""
        self._strays: dict[str, bool] = {}
        """Requests that were given up and that the server may still be at; whether it has confirmed
        that they are ended."""
        self._gate = RequestGate()
        self._stats = EngineStats(self.metric_names)
        self._metrics_read = 0.0
        self._metrics_due = False
        """Whether a pause has still to read the server's metrics."""
        self._reading: asyncio.Task[None] | None = None
        self._cache_salt = uuid.uuid4().hex
        self._background: set[asyncio.Task[None]] = set()
        self._connection: EngineClient | None = None
        self._closed = False

    @property
    def weight_version(self) -> int:
        """The policy version that the next token is sampled from."""
        return self._version

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and response together, that one request may hold."""
        return self.route.limits.max_model_len

    @property
    def repeats(self) -> bool:
        """False: the numerics of a server depend on what it samples at the same time."""
        return False

    @property
    def label(self) -> str:
        """The server's name, or its address."""
        return self.server.name if self.server is not None else self._url

    @property
    def num_weight_ranks(self) -> int:
        """Processes of the server that hold weights and join a process group."""
        return self._num_weight_ranks

    @property
    def memory_device(self) -> torch.device | None:
        """The GPU whose memory the server can open, as this process numbers it; None: any."""
        return self._memory_device

    @property
    def incarnation(self) -> int:
        """How often the server has been started."""
        return self._incarnation

    @property
    def dead(self) -> bool:
        """True when the server's process has ended by itself."""
        return self.server is not None and self.server.died.is_set()

    @property
    def condemned(self) -> str | None:
        """Why requests are refused, if they are."""
        return self._gate.condemned

    async def start(self) -> None:
        """Start the server, if it is ours, connect, and sample a token to see that it can.

        Raises:
            EngineError: it does not start, or cannot sample from this model.
        """
        if self.server is not None:
            await self.server.start()
        await self._connect()
        try:
            await self._label(self._version)
        except EngineError as error:
            if self.server is None and isinstance(error.__cause__, httpx.ConnectError):
                raise EngineError(
                    f"nothing answers at {self._url}, which engine.urls names: start the server "
                    "there, or correct the address"
                ) from error
            raise
        if self.server is None:
            await self._resume()  # a run that was killed may have left it paused
        self._gate.open()
        await self.generate((0,), SamplingParams(max_new_tokens=1, logprobs=False))
        self._stats.take()

    async def restart(self) -> None:
        """Start the server again. It holds the weights it first had, so it refuses requests.

        `set_version` and `resume`, as at the end of an update, let it serve.
        """
        assert self.server is not None
        self._gate.condemn(self.server.describe_death())
        await self.server.restart()
        self._gate.condemn("its server was started again and does not hold the newest weights")
        await self._connect()
        self._stats.forget_server()
        self._asleep.clear()
        self._paused = False
        self._strays.clear()

    async def close(self) -> None:
        """End the server, if it is ours, and every request."""
        self._closed = True
        self._gate.condemn("it is closed")
        for task in tuple(self._background):
            task.cancel()
        await self._transport.close()
        if self._connection is not None:
            await self._connection.close()
        if self.server is not None:
            await self.server.stop()

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        rollout_id: str = "",
        group_id: str = "",
        replica: int | None = None,
    ) -> Generation:
        """Sample a continuation; see `Engine.generate`. `replica` picks a data-parallel replica."""
        self.route.check(token_ids, params)

        async def send(permit: Permit, sent: Callable[[], None]) -> Generation:
            return await self.route.sample(self._token_client, token_ids, params, permit, sent)

        return await self.request(send, len(token_ids), Place(replica, rollout_id, group_id))

    async def request(self, send: Send[A], prompt_tokens: int, place: Place) -> A:
        """Admit one request, have it sent, and count what came of it.

        Every request of the engine goes through here, also those that another process sends: none
        is admitted while the weights change, and all are known, and can be ended.

        Args:
            send: sends it; cancelled when the request is given up.
            prompt_tokens: of the prompt.
            place: where the prefix is cached.

        Raises:
            EngineError: the engine takes no requests, or this one failed.
        """
        await self._gate.enter()
        with self._stats.request() as elapsed:
            found = None
            sibling = await self._sibling(prompt_tokens, place)
            if sibling.first:
                found = await self._compute(send, place, sibling)
            answer = await self._admit(send, place, found=found)
            self._stats.record(prompt_tokens, answer, elapsed())
        self._read_metrics_now_and_then()
        return answer

    async def _sibling(self, prompt_tokens: int, place: Place) -> Sibling:
        """The request as one of its group, once it is its turn."""
        return Sibling()

    async def _compute(self, send: Send[A], place: Place, sibling: Sibling) -> int:
        """Have the prompt of a group computed; how many of its tokens were cached before."""
        try:
            answer = await self._admit(send, place, computes_only=True)
        except EngineError:
            sibling.settled = True  # else the others might fail one after another, each as late
            raise
        else:
            sibling.settled = answer.finish_reason != "abort"
            return answer.cached_tokens
        finally:
            sibling.end()

    async def _admit(
        self, send: Send[A], place: Place, *, computes_only: bool = False, found: int | None = None
    ) -> A:
        """Admit a request, and have it sent."""
        await self._gate.enter()
        permit = Permit(
            request_id=uuid.uuid4().hex,
            url=self._token_client.url,
            label=self.label,
            version=self._version,
            cache_salt=self._cache_salt,
            place=place,
            adapter=self._adapter,
            computes_only=computes_only,
            found=found,
        )
        request_id = permit.request_id
        try:
            call = send(permit, partial(self._gate.note_sent, request_id))
            return await self._gate.run(request_id, call)
        except asyncio.CancelledError:
            self._stats.record_unanswered("cancelled")
            self._abort_later(request_id)
            raise
        except EngineError as error:
            late = isinstance(error, NoAnswerError) and error.late
            self._stats.record_unanswered("timed_out" if late else "failed")
            self._abort_later(request_id)
            raise await self._explained(error) from error

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop sampling; see `Engine.pause`.

        A server of ours that has no requests stays as it is, since the gate keeps them from it:
        vLLM takes 20 ms to pause. One of several replicas is told in any case: replicas may compute
        with each other for a while after the last request.

        Raises:
            EngineError: requests in flight are to be held by a server that could not say afterwards
                which weights sampled which of their tokens.
        """
        if mode == "keep" and not self.route.knows_versions and self._gate.in_flight:
            raise EngineError(
                f"{self.label} is too old to say which weights sampled each token, so that its "
                "requests cannot go on under new weights: set engine.pause_mode to wait or abort"
            )
        self._metrics_due = True
        self._gate.close()
        await (self._gate.wait_idle() if mode == "wait" else self._gate.wait_sent())
        if self.server is None or self.replicas > 1 or self._gate.in_flight or self._strays:
            self._paused = True
            strays = tuple(self._strays)  # others may come while it is told
            await self._pause(mode)
            for stray in strays:
                if self._strays.get(stray):  # else it goes on when the server does
                    del self._strays[stray]

    async def resume(self) -> None:
        """Go on sampling.

        Raises:
            EngineError: what the engine holds must not be sampled from.
        """
        if self._gate.shut is not None:
            raise EngineError(f"{self.label} cannot go on: {self._gate.shut}")
        self._read_due_metrics()
        if not self._asleep:
            if self._paused:
                await self._resume()
                self._paused = False
            self._gate.open()
        if self._reading is not None:
            await asyncio.wait([self._reading])
            self._reading = None

    async def update_weights(self, source: WeightSource) -> None:
        """Replace the weights of this engine; see `weight_update`."""
        await update_weights([self], source, self._transport, self._update)

    async def set_version(self, version: int) -> None:
        """Label every token from now on; the engine holds whole weights again."""
        await self._label(version)
        self._version = version
        self._gate.absolve()

    async def forget_prefixes(self, salt: str) -> None:
        """Flush the cache, and give requests another salt: others may fill it meanwhile."""
        self._cache_salt = salt
        await self.flush_cache()

    def hold(self, reason: str) -> None:
        """Hold requests back and refuse to resume until `set_version`."""
        self._gate.hold(reason)

    async def condemn(self, reason: str) -> None:
        """Refuse requests, and fail those in flight, until an update succeeds."""
        self._gate.condemn(reason)

    async def sleep(self, level: int = 1) -> None:
        """Give device memory back when the requests in flight have ended; see `Engine.sleep`."""
        self._gate.close()
        await self._gate.wait_idle()
        await self._sleep(level)
        self._asleep = {"weights", "kv_cache"}
        if level == 2:
            self._gate.condemn("its weights were dropped by sleep level 2")

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take device memory again; requests pass when everything is back.

        Raises:
            EngineError: the cache is asked for while the weights are still away.
        """
        wanted = [tag for tag in ("weights", "kv_cache") if tag in tags and tag in self._asleep]
        if "weights" in self._asleep and wanted == ["kv_cache"]:
            raise EngineError("wake the weights, load them, and only then wake the kv_cache")
        for tag in wanted:
            await self._wake(tag)
            self._asleep.discard(tag)
        if not self._asleep and self._gate.condemned is None:
            await self.resume()

    def stats(self) -> Mapping[str, float]:
        """Metrics since the last call; the server's own as of the last refresh or resume."""
        return self.take_counts().metrics()

    def take_counts(self) -> EngineCounts:
        """The same as counts, which add up with those of other engines."""
        return self._stats.take()

    async def refresh_stats(self) -> None:
        """Read the server's metrics now. It is done between every pause and its end, too."""
        self._metrics_read = time.monotonic()
        with contextlib.suppress(EngineError):  # an external server may not offer them
            text = (await self._client.get("/metrics", limit=METRICS_SECONDS)).text
            self._stats.record_server(prometheus.parse(text))

    @abstractmethod
    async def _abort(self, request_id: str) -> None:
        """End one request on the server; returns when it has ended there."""

    @abstractmethod
    async def _pause(self, mode: PauseMode) -> None: ...

    @abstractmethod
    async def _resume(self) -> None: ...

    @abstractmethod
    async def _label(self, version: int) -> None: ...

    @abstractmethod
    async def _sleep(self, level: int) -> None: ...

    @abstractmethod
    async def _wake(self, tag: str) -> None: ...

    async def _label_tokens(self, body: Mapping[str, Any]) -> None:
        """Tell the server the version to report, where it knows versions."""
        if not self._takes_labels:
            return
        try:
            await self._client.post("/update_weight_version", body, repeatable=True)
        except RequestRefusedError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
            self._takes_labels = False

    @property
    def _client(self) -> EngineClient:
        if self._connection is None:
            raise EngineError(f"{self.label} is used before start()")
        return self._connection

    @property
    def _token_client(self) -> EngineClient:
        """Where requests for tokens are sent."""
        return self._client

    async def _connect(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self.server is not None:
            self._url = self.server.url
        self._incarnation += 1
        self._takes_labels = True
        self._connection = self._make_client(self._url)

    def _make_client(self, url: str) -> EngineClient:
        return EngineClient(url, limit=self.route.limits.request_timeout, api_key=self._api_key)

    async def _explained(self, error: EngineError) -> EngineError:
        """The same error, or that the server has died if that is what it comes from."""
        broken = isinstance(error, NoAnswerError)
        if isinstance(error, RequestRefusedError):
            broken = error.status >= httpx.codes.INTERNAL_SERVER_ERROR
        if self.server is None or not broken:
            return error
        try:
            await asyncio.wait_for(self.server.died.wait(), DEATH_SECONDS)
        except TimeoutError:
            return error
        return EngineError(self.server.last_death)  # it may be starting again already

    def _read_metrics_now_and_then(self) -> None:
        """Read the server's metrics while it works: how full its cache is cannot be seen later."""
        due = time.monotonic() - self._metrics_read >= METRICS_INTERVAL
        if due and self._stats.in_flight and not self._closed:
            self._metrics_read = time.monotonic()
            self._in_background(self.refresh_stats())

    def _read_due_metrics(self) -> None:
        """Read what a pause has to, at a moment when the server has other things to wait for."""
        if self._metrics_due:
            self._metrics_due = False
            self._reading = self._in_background(self.refresh_stats())

    def _abort_later(self, request_id: str) -> None:
        """End the request on the server without waiting for it, unless there is no server."""
        self._strays[request_id] = False
        if not self.dead and not self._closed:
            self._in_background(self._try_abort(request_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _try_abort(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self._abort(request_id)
        except (EngineError, TimeoutError) as error:
            logger.debug("request %s was not aborted: %s", request_id, error)
            return
        if request_id in self._strays:  # else the server was started again meanwhile
            self._strays[request_id] = True
