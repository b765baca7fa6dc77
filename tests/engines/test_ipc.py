"""Shared buffers are on the GPU of the engine that opens them, whichever the learner's is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines.conftest import server_config
from engines.tiny import build_model, save_model

from agentrl.engines import servers
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.engines.transport.base import WeightReceiver
from agentrl.engines.transport.buckets import Bucket, TensorSpec
from agentrl.engines.transport.ipc import IPCTransport
from agentrl.engines.transport.shared_memory import SharedBuffer
from agentrl.errors import UsageError

# Two places that a CPU can tell apart.
FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)


class Opened(WeightReceiver):
    """Reads what it is given, as an engine does, and remembers the buffer."""

    label, num_weight_ranks, incarnation = "opened", 1, 1

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.values: list[float] = []
        self.buffers: list[str] = []

    @property
    def memory_device(self) -> torch.device | None:
        return self._device

    async def begin_update(self) -> None: ...

    async def end_update(self) -> None: ...

    async def receive_shared(self, specs: Sequence[TensorSpec], buffer: SharedBuffer) -> None:
        nbytes = sum(spec.nbytes for spec in specs)
        self.values += buffer.flat[:nbytes].view(torch.float32).tolist()
        self.buffers.append(buffer.name)

    async def not_called(self, *_: object) -> None:
        raise AssertionError("this transport has no use for it")

    load_folder = join_group = leave_group = receive_broadcast = checksums = not_called


async def buckets(values: Sequence[float]) -> AsyncIterator[Bucket]:
    for value in values:
        yield Bucket(
            (TensorSpec("weight", "float32", (1,)),), torch.tensor([value]).view(torch.uint8)
        )


async def test_engines_open_two_buffers_on_their_own_device_and_share_them_there() -> None:
    receivers = [Opened(FIRST), Opened(SECOND), Opened(SECOND)]
    transport = IPCTransport(64)
    for version in (1, 2):
        await transport.send(receivers, buckets([1.0, 2.0, 3.0]), version)
    assert all(receiver.values == [1.0, 2.0, 3.0] * 2 for receiver in receivers)
    first, second, beside_second = (set(receiver.buffers) for receiver in receivers)
    assert len(first) == len(second) == 2
    assert second == beside_second
    assert not first & second
    await transport.close()


async def test_a_bucket_that_no_buffer_holds_gets_a_larger_one() -> None:
    receiver, transport = Opened(None), IPCTransport(2)
    await transport.send([receiver], buckets([1.0, 2.0, 3.0]), 1)
    assert receiver.values == [1.0, 2.0, 3.0]
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
