"""Weights by broadcast in a process group of its own: `gloo` between hosts, `nccl` between GPUs.

The learner's rank 0 is rank 0 of the group, every engine process another rank. Each bucket is one
broadcast of bytes. The group is made at the first transfer, made anew when the set of engines
changes, and torn down when a transfer fails.

The first transfer of a group announces each bucket before it is sent. The next ones bring the same
buckets, so that all are announced at once, and nobody waits for a request between two of them: the
broadcast of a bucket begins before that of the one before has ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from agentrl.engines.server import free_port
from agentrl.engines.transport.base import GroupAddress, WeightReceiver, WeightTransport
from agentrl.engines.transport.buckets import Bucket, TensorSpec
from agentrl.engines.transport.together import together
from agentrl.errors import EngineError

__all__ = ["GroupTransport", "new_group"]

LEAVE_SECONDS = 10.0
BROADCAST_FAILED = "the broadcast of weights failed"
T = TypeVar("T")
Buckets = tuple[tuple[TensorSpec, ...], ...]
"""What lies in each bucket of a transfer."""


def new_group(address: GroupAddress, rank: int) -> dist.ProcessGroup:
    """Join a process group that is independent of the default one.

    `torch.distributed` makes groups only out of members of the default group, which learner and
    engines do not share; its own helper makes one out of any store. Both sides prefix the store
    with the group's name, as SGLang does.
    """
    limit = timedelta(seconds=address.timeout)
    store = TCPStore(
        address.host,
        address.port,
        address.world_size,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
    )
    group: dist.ProcessGroup = c10d._new_process_group_helper(
        address.world_size,
        rank,
        [],
        dist.Backend(address.backend),
        c10d.PrefixStore(address.name, store),
        group_name=c10d.GroupName(address.name),
        timeout=limit,
    )[0]
    c10d._world.pg_group_ranks[group] = {i: i for i in range(address.world_size)}
    return group


class GroupTransport(WeightTransport):
    """Broadcasts buckets over `gloo` or `nccl`.

    Args:
        backend: `nccl` needs the weights on a GPU, and no engine on the learner's own GPU: NCCL
            refuses two ranks on one device.
        host: An address of this process that every engine can reach.
        timeout: Seconds that one collective may take.
    """

    def __init__(
        self, backend: Literal["gloo", "nccl"], *, host: str = "127.0.0.1", timeout: float = 600.0
    ) -> None:
        self.name = backend
        self._backend = backend
        self._host = host
        self._timeout = timeout
        self._address: GroupAddress | None = None
        self._group: dist.ProcessGroup | None = None
        self._members: tuple[tuple[WeightReceiver, int], ...] = ()
        self._known: Buckets | None = None
        """What the group's last transfer brought."""
        self._device = torch.device("cpu")
        """Where it came from."""
        self._left: list[tuple[WeightReceiver, int, str]] = []
        """Members, with their incarnation and group, that do not know yet that we have left."""

    async def send(
        self,
        receivers: Sequence[WeightReceiver],
        buckets: AsyncIterator[Bucket],
        version: int,
    ) -> None:
        """See `WeightTransport.send`."""
        try:
            if self._group is None or self._members != _with_incarnations(receivers):
                await self._connect(receivers)
            calls = None if self._known is None else 1
            await together(receiver.begin_update(calls) for receiver in receivers)
            if self._known is None:
                self._known = await self._announcing_each(buckets, receivers)
            else:
                sending = self._announced(buckets, self._known)
                await together([sending, *self._receiving(self._known, receivers)])
            await together(receiver.end_update() for receiver in receivers)
        except BaseException:
            self._tear_down()
            raise

    async def close(self) -> None:
        """Leave the group."""
        self._tear_down()
        await self._have_members_leave()

    async def _connect(self, receivers: Sequence[WeightReceiver]) -> None:
        await self.close()
        ranks = [receiver.num_weight_ranks for receiver in receivers]
        offsets = itertools.accumulate(ranks, initial=1)
        address = GroupAddress(
            # A server may still hold the group of a learner that was killed.
            name=f"agentrl-weights-{uuid.uuid4().hex}",
            backend=self._backend,
            host=self._host,
            port=free_port(self._host),
            world_size=1 + sum(ranks),
            timeout=self._timeout,
        )
        joining = [r.join_group(address, o) for r, o in zip(receivers, offsets, strict=False)]
        mine = _in_daemon_thread(lambda: _joined(address))
        self._group = (await together([mine, *joining]))[0]
        self._address, self._members = address, _with_incarnations(receivers)

    async def _announcing_each(
        self, buckets: AsyncIterator[Bucket], receivers: Sequence[WeightReceiver]
    ) -> Buckets:
        """Announce and send one bucket after another; returns what there was."""
        sent = []
        async for bucket in buckets:
            self._device = bucket.flat.device
            receiving = self._receiving([bucket.specs], receivers)
            await together([self._send_one(bucket), *receiving])
            sent.append(bucket.specs)
        return tuple(sent)

    async def _announced(self, buckets: AsyncIterator[Bucket], known: Buckets) -> None:
        """Send buckets that are announced.

        The receivers wait for all of them. Whatever fails here, they get as many bytes: that the
        group is torn down may not reach them before its time limit, since NCCL does not tell, and
        gloo does not where another process has inherited its connections.
        """
        expected = deque(known)
        under_way: tuple[Bucket, asyncio.Future[None]] | None = None
        try:
            async for bucket in buckets:
                if not expected or bucket.specs != expected[0]:
                    raise _other_weights(bucket.specs[0].name)
                expected.popleft()
                end = await self._begin(bucket)
                await _end_of(under_way)
                under_way = bucket, end
            await _end_of(under_way)
            if expected:
                raise _other_weights(expected[0][0].name)
        except Exception:
            sizes = [sum(spec.nbytes for spec in specs) for specs in expected]
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    group = self._group
                    await _in_daemon_thread(lambda: self._send_anything(sizes, group))
                    await _end_of(under_way)
            raise

    def _receiving(
        self, buckets: Sequence[Sequence[TensorSpec]], receivers: Sequence[WeightReceiver]
    ) -> list[Coroutine[Any, Any, None]]:
        assert self._address is not None
        return [receiver.receive_broadcasts(buckets, self._address.name) for receiver in receivers]

    async def _send_one(self, bucket: Bucket) -> None:
        await _end_of((bucket, await self._begin(bucket)))

    async def _begin(self, bucket: Bucket) -> asyncio.Future[None]:
        """Begin a broadcast; the future is its end, after which the bucket is to be released.

        One thread begins it and waits for it, and keeps the group: dropped here while a receiver
        hangs, gloo's would stop the event loop until its time limit. The group is that of now, also
        where the thread comes late: another, or torch's default one, has other members.
        """
        group = self._group
        begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        begun.set_running_or_notify_cancel()

        def broadcast() -> None:
            try:
                wait = self._begin_bytes(bucket.flat, group)
            except BaseException as error:
                begun.set_exception(error)
                raise
            begun.set_result(None)
            wait()

        end = _in_daemon_thread(broadcast)
        await asyncio.wrap_future(begun)
        return end

    def _begin_bytes(
        self, flat: torch.Tensor, group: dist.ProcessGroup | None
    ) -> Callable[[], None]:
        """Begin a broadcast of bytes that are there; returns what waits for its end.

        In a thread that may wait.
        """
        with _as_engine_errors(BROADCAST_FAILED):
            if self._backend == "gloo":
                sent, stream = flat.cpu(), None
            else:
                torch.cuda.set_device(flat.device)  # of this thread
                # On the stream that buckets are packed on, the GPU would pack and send in turn.
                sent, stream = flat, torch.cuda.Stream(flat.device)  # type: ignore[no-untyped-call]
            if group is None or group is not self._group:
                raise EngineError("the update was given up before a bucket was sent")
            with _on(stream):
                work = dist.broadcast(sent, src=0, group=group, async_op=True)
        assert work is not None, "this process is in the group"
        return partial(_wait, work, stream, group)

    def _send_anything(self, sizes: list[int], group: dist.ProcessGroup | None) -> None:
        for nbytes in sizes:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._begin_bytes(flat, group)()

    def _tear_down(self) -> None:
        """End this side of the group at once; a member that waits for it gets an error."""
        group, address, members = self._group, self._address, self._members
        self._group, self._address, self._members, self._known = None, None, (), None
        if group is not None and address is not None:
            self._left += [(member, i, address.name) for member, i in members]
            group.abort()
            dist.destroy_process_group(group)

    async def _have_members_leave(self) -> None:
        left, self._left = self._left, []
        leaving = [
            member.leave_group(name)
            for member, incarnation, name in left
            if member.incarnation == incarnation
        ]
        # A member that is gone, hangs, or has left already is no failure of ours.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                results = await asyncio.gather(*leaving, return_exceptions=True)
                for result in results:
                    if isinstance(result, BaseException) and not isinstance(result, EngineError):
                        raise result


def _wait(work: dist.Work, stream: torch.cuda.Stream | None, _group: dist.ProcessGroup) -> None:
    """Wait for a broadcast. Its group is kept meanwhile: it joins its threads when it goes."""
    with _on(stream), _as_engine_errors(BROADCAST_FAILED):
        work.wait()
        if stream is not None:
            stream.synchronize()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _joined(address: GroupAddress) -> dist.ProcessGroup:
    with _as_engine_errors("the group for the weights could not be joined"):
        return new_group(address, 0)


@contextlib.contextmanager
def _as_engine_errors(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise EngineError(f"{what} ({error})") from error


def _other_weights(name: str) -> EngineError:
    return EngineError(
        f"the weights are no longer those of the last update, from {name} on: update again, which "
        "announces them anew"
    )


async def _end_of(broadcast: tuple[Bucket, asyncio.Future[None]] | None) -> None:
    """Wait for a broadcast, if there is one, and release its bucket."""
    if broadcast is not None:
        bucket, end = broadcast
        await end
        bucket.release()


def _in_daemon_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Begin what may block until its own time limit when the other side is gone.

    A worker of the event loop's pool would be waited for when the program ends.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if outcome.set_running_or_notify_cancel():
            try:
                outcome.set_result(call())
            except BaseException as error:  # noqa: BLE001 (whoever waits is told)
                outcome.set_exception(error)

    threading.Thread(target=run, name="agentrl-weights", daemon=True).start()
    result = asyncio.wrap_future(outcome)
    result.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody waits
    return result


def _with_incarnations(
    receivers: Sequence[WeightReceiver],
) -> tuple[tuple[WeightReceiver, int], ...]:
    return tuple((receiver, receiver.incarnation) for receiver in receivers)
