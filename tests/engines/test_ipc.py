"""Shared buffers are where engines open them, and keep a bucket until every engine has read it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines.conftest import server_config
from engines.tiny import build_model, save_model

from agentrl.engines import servers
from agentrl.engines.base import WeightSource
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.engines.transport.base import WeightReceiver
from agentrl.engines.transport.buckets import TensorSpec
from agentrl.engines.transport.ipc import IPCTransport
from agentrl.engines.transport.shared_memory import SharedBuffer
from agentrl.engines.transport.stream import BucketStream
from agentrl.errors import EngineError, UsageError

# Two places that a CPU can tell apart.
FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)


async def at_once(index: int) -> None:
    """Read without waiting."""


class Opened(WeightReceiver):
    """Reads what it is given, as an engine does, when `load` of the bucket's number has ended."""

    label, num_weight_ranks, incarnation = "opened", 1, 1

    def __init__(
        self,
        device: torch.device | None = None,
        load: Callable[[int], Awaitable[None]] = at_once,
    ) -> None:
        self._device = device
        self.load = load
        self.begun: list[int | None] = []
        self.told: list[str] = []
        self.values: dict[str, float] = {}
        self.buffers: list[SharedBuffer] = []

    @property
    def memory_device(self) -> torch.device | None:
        return self._device

    @property
    def names(self) -> set[str]:
        """Of the buffers it was told of."""
        return {buffer.name for buffer in self.buffers}

    async def begin_update(self, calls: int | None = None) -> None:
        self.begun.append(calls)

    async def end_update(self) -> None: ...

    async def receive_shared(self, specs: Sequence[TensorSpec], buffer: SharedBuffer) -> None:
        self.told.append(specs[0].name)
        self.buffers.append(buffer)
        await self.load(len(self.told) - 1)
        nbytes = sum(spec.nbytes for spec in specs)
        read = buffer.flat[:nbytes].view(torch.float32).tolist()
        self.values |= zip((spec.name for spec in specs), read, strict=True)

    async def not_called(self, *_: object) -> None:
        raise AssertionError("this transport has no use for it")

    load_folder = join_group = leave_group = receive_broadcasts = checksums = not_called


async def send(
    transport: IPCTransport,
    receivers: Sequence[Opened],
    values: Sequence[float],
    *,
    capacity: int = 4,
    live: bool = True,
) -> None:
    """An update of one number a tensor, and by default one tensor a bucket."""
    weights = [(str(i), torch.tensor([value])) for i, value in enumerate(values)]
    source = WeightSource(lambda: iter(weights), 1, live=live)
    stream = BucketStream(source, capacity, transport.memory(receivers))
    try:
        await transport.send(receivers, aiter(stream), 1)
    finally:
        await stream.finish()


def numbered(values: Sequence[float]) -> dict[str, float]:
    return {str(i): value for i, value in enumerate(values)}


async def test_engines_open_two_buffers_on_their_own_device_and_share_them_there() -> None:
    receivers = [Opened(FIRST), Opened(SECOND), Opened(SECOND)]
    transport = IPCTransport()
    for values in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
        await send(transport, receivers, values)
        assert all(receiver.values == numbered(values) for receiver in receivers)
    first, second, beside_second = (receiver.names for receiver in receivers)
    assert len(first) == len(second) == 2
    assert second == beside_second
    assert not first & second
    await transport.close()


async def test_a_bucket_that_no_buffer_holds_gets_a_larger_one() -> None:
    receiver, transport = Opened(), IPCTransport()
    await send(transport, [receiver], [1.0, 2.0])
    await send(transport, [receiver], [1.0, 2.0, 3.0, 4.0], capacity=8)
    assert receiver.values == numbered([1.0, 2.0, 3.0, 4.0])
    assert len(receiver.names) == 4
    await transport.close()


@pytest.mark.parametrize("live", [False, True])
async def test_engines_that_read_late_and_in_another_order_read_what_was_sent(live: bool) -> None:
    async def even_ones_late(index: int) -> None:
        await asyncio.sleep(0.02 * (1 - index % 2))

    async def odd_ones_late(index: int) -> None:
        await asyncio.sleep(0.02 * (index % 2))

    receivers = [Opened(load=even_ones_late), Opened(load=odd_ones_late)]
    transport = IPCTransport()
    for version in (1, 2):
        values = [float(10 * version + i) for i in range(8)]
        await send(transport, receivers, values, live=live)
        assert all(receiver.values == numbered(values) for receiver in receivers)
    assert all(len(receiver.names) == 2 for receiver in receivers)
    await transport.close()


async def test_an_engine_is_told_of_the_next_bucket_while_it_loads_and_of_no_more() -> None:
    second_told, checked = asyncio.Event(), asyncio.Event()

    async def load(index: int) -> None:
        if index == 0:
            await second_told.wait()
            await asyncio.sleep(0.05)  # time enough to be told of a third
            checked.set()
        else:
            second_told.set()
            await checked.wait()
            if index == 1:
                assert receiver.told == ["0", "1"]

    receiver, transport = Opened(load=load), IPCTransport()
    async with asyncio.timeout(10):
        await send(transport, [receiver], [1.0, 2.0, 3.0, 4.0])
    assert receiver.values == numbered([1.0, 2.0, 3.0, 4.0])
    await transport.close()


async def test_what_an_engine_may_still_read_after_a_failure_is_never_written_again() -> None:
    async def fails(index: int) -> None:
        if index == 3:
            raise EngineError("the engine broke")

    async def hangs(index: int) -> None:
        if index >= 2:
            await asyncio.Event().wait()

    failing, hanging = Opened(load=fails), Opened(load=hangs)
    receivers, transport = [failing, hanging], IPCTransport()
    with pytest.raises(EngineError, match="the engine broke"):
        await send(transport, receivers, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert hanging.values == numbered([1.0, 2.0])
    given_up = hanging.buffers[2:]
    failing.load = hanging.load = at_once
    values = [7.0, 8.0, 9.0]
    await send(transport, receivers, values)
    for receiver in receivers:
        assert {name: receiver.values[name] for name in ("0", "1", "2")} == numbered(values)
    assert [buffer.flat.view(torch.float32).item() for buffer in given_up] == [3.0, 4.0]
    await transport.close()


async def test_engines_are_told_how_many_buckets_there_will_be_once_it_is_known() -> None:
    receiver, transport = Opened(), IPCTransport()
    for _ in range(3):
        await send(transport, [receiver], [1.0, 2.0, 3.0])
    assert receiver.begun == [None, 3, 3]
    for values in ([1.0, 2.0], [1.0, 2.0, 3.0]):
        with pytest.raises(
            EngineError, match=r"buckets than the \d of the last update: update again"
        ):
            await send(transport, [receiver], values)
        await send(transport, [receiver], values)
        assert receiver.values == numbered(values) | {"2": 3.0}
    assert receiver.begun[3:] == [3, None, 2, None]
    for _ in range(2):
        with contextlib.suppress(EngineError):
            await send(transport, [receiver], [])
    await send(transport, [receiver], [1.0])
    assert receiver.begun[7:] == [3, None, None]
    await transport.close()


async def test_a_transfer_that_is_cancelled_leaves_the_transport_ready_for_another() -> None:
    async def hangs(index: int) -> None:
        await asyncio.Event().wait()

    receiver, transport = Opened(load=hangs), IPCTransport()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(send(transport, [receiver], [1.0, 2.0, 3.0]), 0.05)
    given_up = tuple(receiver.buffers)
    receiver.load = at_once
    await send(transport, [receiver], [4.0, 5.0, 6.0])
    assert receiver.values == numbered([4.0, 5.0, 6.0])
    assert [buffer.flat.view(torch.float32).item() for buffer in given_up] == [1.0, 2.0]
    await transport.close()


def devices_of(tmp_path: Path, **engine: object) -> list[torch.device | None]:
    """Where each of two servers would open weights; none is started."""
    model = build_model(0)
    folder = save_model(model, tmp_path / "model")
    config = server_config("fake-vllm", num_engines=2, transport="ipc", **engine)
    pool = make_engine(config, run_dir=tmp_path, model_folder=folder)
    assert isinstance(pool, EnginePool)
    return [engine.memory_device for engine in pool.engines]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    # For that module alone: others would remember what they saw.
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4)
    monkeypatch.setattr(servers, "torch", SimpleNamespace(cuda=cuda, device=torch.device))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("four_gpus")
def test_weights_are_put_on_the_first_gpu_of_each_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices_of(tmp_path, gpus=[0, 1, 2, 3], tensor_parallel_size=2) == [
        torch.device("cuda", 0),
        torch.device("cuda", 2),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert devices_of(tmp_path, gpus=[1, 3]) == [torch.device("cuda", 1), torch.device("cuda", 0)]
    assert devices_of(tmp_path) == [None, None]


@pytest.mark.usefixtures("four_gpus")
def test_an_engine_on_a_gpu_that_the_learner_does_not_see_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match=r"GPU 1 of engine\.gpus.* use nccl"):
        devices_of(tmp_path, gpus=[0, 1])
