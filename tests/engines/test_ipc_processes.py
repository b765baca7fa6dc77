"""Weights through shared memory into real processes: every byte, while the next one is packed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import multiprocessing
import pickle
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import pytest
import torch

from agentrl.engines.base import WeightSource
from agentrl.engines.transport.base import WeightReceiver
from agentrl.engines.transport.buckets import TensorSpec
from agentrl.engines.transport.ipc import IPCTransport
from agentrl.engines.transport.shared_memory import SharedBuffer, share_parts
from agentrl.engines.transport.stream import BucketStream

TENSORS, ELEMENTS = 24, 1 << 18
THREE_TENSORS = 3 * 2 * ELEMENTS


def read_late(connection: Connection) -> None:
    """What an engine does: open each buffer once, and copy out of it some time after being told."""
    opened: dict[str, torch.Tensor] = {}
    while (message := connection.recv()) is not None:
        name, handle, nbytes = message
        if name not in opened:
            rebuild, arguments = pickle.loads(base64.b64decode(handle))
            if rebuild.__name__ == "rebuild_cuda_tensor":
                arguments = (*arguments[:6], device_of(arguments[6]), *arguments[7:])
            opened[name] = rebuild(*arguments)
        time.sleep(0.005)
        connection.send(digest([opened[name][:nbytes]]))


def device_of(uuid: str) -> int:
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [str(device.uuid) for device in properties].index(uuid)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """SHA-256 of the bytes of tensors, one after the other."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Process(WeightReceiver):
    """A process that reads, and what it read of each bucket, by the name of its first tensor."""

    label, num_weight_ranks, incarnation = "process", 1, 1

    def __init__(self, device: torch.device | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=read_late, args=(other,), daemon=True)
        self.process.start()
        self.read: dict[str, str] = {}
        self._device = device
        self._one_after_another = asyncio.Lock()

    @property
    def memory_device(self) -> torch.device | None:
        return self._device

    async def begin_update(self, calls: int | None = None) -> None: ...

    async def end_update(self) -> None: ...

    async def receive_shared(self, specs: Sequence[TensorSpec], buffer: SharedBuffer) -> None:
        nbytes = sum(spec.nbytes for spec in specs)
        async with self._one_after_another:
            self.connection.send((buffer.name, share_parts(buffer.flat), nbytes))
            self.read[specs[0].name] = await asyncio.to_thread(self.connection.recv)

    def end(self) -> None:
        self.connection.send(None)
        self.process.join()

    async def not_called(self, *_: object) -> None:
        raise AssertionError("this transport has no use for it")

    load_folder = join_group = leave_group = receive_broadcasts = checksums = not_called


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    ("home", "elsewhere"),
    [
        ("cpu", None),
        pytest.param("cuda:0", None, marks=pytest.mark.gpu),
        pytest.param("cuda:0", "cuda:1", marks=pytest.mark.gpu),
    ],
)
async def test_processes_read_the_bytes_of_every_version(
    home: str, elsewhere: str | None, live: bool
) -> None:
    if elsewhere is not None and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    generator = torch.Generator().manual_seed(0)
    weights = [
        (str(i), torch.randn(ELEMENTS, generator=generator).bfloat16().to(home))
        for i in range(TENSORS)
    ]

    def named_weights() -> Iterator[tuple[str, torch.Tensor]]:
        drawn = torch.empty_like(weights[0][1])
        for name, weight in weights:
            yield name, weight if live else drawn.copy_(weight)

    receivers = [Process(None), Process(torch.device(elsewhere) if elsewhere else None)]
    transport = IPCTransport()
    try:
        for version in (1, 2, 3):
            for _, weight in weights:
                weight.add_(1)
            source = WeightSource(named_weights, version, live=live)
            stream = BucketStream(source, THREE_TENSORS, transport.memory(receivers))
            await transport.send(receivers, aiter(stream), version)
            await stream.finish()
            expected = {
                str(i): digest([weight for _, weight in weights[i : i + 3]])
                for i in range(0, TENSORS, 3)
            }
            assert all(receiver.read == expected for receiver in receivers)
    finally:
        for receiver in receivers:
            receiver.end()
        await transport.close()
