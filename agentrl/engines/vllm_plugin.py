"""Runs inside vLLM: receives weights over a torch process group or out of shared memory.

vLLM finds it as a plugin (`vllm.general_plugins`), so this file and those that it imports from
beside it are copied into a folder on the server's PYTHONPATH (see
`agentrl.engines.vllm.install_plugin`). They may import torch and vLLM, and nothing else of agentrl.
The learner's side is `agentrl.engines.transport`.
"""

# mypy: ignore-errors
# vLLM is not installed where types are checked.

from __future__ import annotations

import base64
import contextlib
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerBase

from .in_place import InPlaceUpdates
from .vllm_outputs import hold_outputs

logger = init_logger("vllm.agentrl")

BACKEND = "agentrl"
OPEN_MEMORIES = 2
"""The shared memories that take turns."""


def register() -> None:
    """What vLLM calls in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WeightEngine)
        WorkerBase.agentrl_receive_part = receive_part
        hold_outputs()
    if current_platform.is_cpu():
        from . import vllm_cpu  # imports layers, which a process with a GPU may import later

        vllm_cpu.wait_without_spinning()
        vllm_cpu.have_tied_heads_follow()


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The process group to join, or to leave."""

    name: str
    backend: str = ""
    host: str = ""
    port: int = 0
    world_size: int = 0
    rank_offset: int = 0
    timeout: float = 0.0
    leave: bool = False


Specs = list[tuple[str, str, list[int]]]
"""Name, dtype and shape of each tensor of a bucket."""


@dataclass
class BucketsInfo(WeightTransferUpdateInfo):
    """What is in some buckets, and the group that they come through, or the memory of one."""

    buckets: list[Specs]
    group: str | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    abandon: bool = False


def receive_part(worker: Any, update_info: dict[str, Any], update: str, parts: int) -> None:
    """A method of vLLM's workers: an update in as few requests as it has parts.

    The first part of an `update` opens it, and the last of its `parts` closes it; they may come in
    any order. One that a failure left open is thrown away.
    """
    known, count = getattr(worker, "agentrl_parts", ("", 0))
    if known != update:
        count = 0
        try:
            worker.start_weight_update()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                worker.update_weights({"buckets": [], "abandon": True})
            worker.start_weight_update()
    worker.agentrl_parts = update, count + 1
    worker.update_weights(update_info)
    if count + 1 == parts:
        worker.finish_weight_update()


class WeightEngine(WeightTransferEngine[GroupInfo, BucketsInfo]):
    """Receives flat buckets, and loads their tensors or copies them (see `in_place`)."""

    init_info_cls = GroupInfo
    update_info_cls = BucketsInfo

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._opened: dict[str, torch.Tensor] = {}
        self._updates = self._updates_of(self.model)

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the group, or leave it."""
        if init_info.leave:
            self._leave(init_info.name)
            return
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._groups[init_info.name] = _join(init_info, init_info.rank_offset + rank)

    def start_weight_update(self) -> None:
        """Let the layers take weights again, unless they are to be copied into them."""
        _discard_partial_load(self.model)
        if self._updates.model is not self.model:  # a draft model, or no longer one
            self._updates = self._updates_of(self.model)
        self._updates.begin()
        if not self._updates.copies:
            with self._updates.loading():
                initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive buckets and load or copy them."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketsInfo) -> None:
        """See `update_weights`."""
        if update_info.abandon:
            raise RuntimeError("the update is abandoned")  # which closes it, in the worker's books
        sizes = [sum(map(_nbytes, specs)) for specs in update_info.buckets]
        arriving = self._receive(update_info, sizes)
        for specs in update_info.buckets:
            self._take(list(_tensors(specs, next(arriving))))  # and keep no bucket that was taken

    def _take(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self._updates.copies:
            self._updates.copy(tensors)
            return
        self._updates.note(tensors)
        with self._updates.loading():
            self.model.load_weights(iter(tensors))

    def finish_weight_update(self) -> None:
        """Let the layers do what they do after a load: on a CPU they are packed again."""
        if self._updates.copies:
            self._updates.copied()
            return
        with self._updates.loading():
            finalize_layerwise_reload(self.model, self.model_config)
        self._updates.loaded()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Older versions of vLLM demand it; the learner has its own way to send."""
        raise NotImplementedError("agentrl sends the weights")

    def shutdown(self) -> None:
        """Leave every group and close every shared memory."""
        for name in list(self._groups):
            self._leave(name)
        self._opened.clear()

    def _updates_of(self, model: torch.nn.Module) -> InPlaceUpdates:
        balances = self.parallel_config.enable_eplb  # experts change places
        return InPlaceUpdates(model, logger.info, placed_anew=balances)

    def _receive(self, info: BucketsInfo, sizes: list[int]) -> Iterator[torch.Tensor]:
        """The bytes of each bucket."""
        if info.group is not None:
            yield from self._receive_broadcasts(self._groups[info.group], sizes)
            return
        for nbytes in sizes:
            # In a load, a layer keeps its tensors until all of them are there, and the memory is
            # written again for a later bucket: hence the copy.
            yield self._open(info.memory)[:nbytes].to(self.device, copy=not self._updates.copies)

    def _receive_broadcasts(
        self, group: dist.ProcessGroup, sizes: list[int]
    ) -> Iterator[torch.Tensor]:
        """While a bucket is copied, the next one is on its way."""
        coming: deque[tuple[torch.Tensor, dist.Work]] = deque()
        for nbytes in sizes:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            coming.append((flat, dist.broadcast(flat, src=0, group=group, async_op=True)))
            del flat
            if len(coming) > 1:
                yield _arrived(*coming.popleft())
        for flat, work in coming:
            yield _arrived(flat, work)

    def _open(self, memory: dict[str, Any]) -> torch.Tensor:
        """The whole of a shared memory, opened once and kept while it takes turns with another.

        After a failure new ones come; the old ones are not freed as long as they are open here.
        """
        name = memory["name"]
        if name not in self._opened:
            while len(self._opened) >= OPEN_MEMORIES:
                del self._opened[next(iter(self._opened))]
            self._opened[name] = _open_shared(memory["handle"])
        return self._opened[name]

    def _leave(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            dist.destroy_process_group(group)


def _arrived(flat: torch.Tensor, work: dist.Work) -> torch.Tensor:
    """What a broadcast has brought; a GPU's later work waits for it, this process need not."""
    work.wait()
    return flat


def _nbytes(spec: tuple[str, str, list[int]]) -> int:
    _, dtype, shape = spec
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize


def _tensors(specs: Specs, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    parts = flat.split([_nbytes(spec) for spec in specs])
    for (name, dtype, shape), part in zip(specs, parts, strict=True):
        yield name, part.view(getattr(torch, dtype)).view(shape)


def _discard_partial_load(model: torch.nn.Module) -> None:
    """Put back the tensors of layers that an abandoned update left waiting for the rest.

    Their pieces would otherwise be mixed with those of the next update.
    """
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def _join(info: GroupInfo, rank: int) -> dist.ProcessGroup:
    limit = timedelta(seconds=info.timeout)
    store = dist.TCPStore(
        info.host, info.port, info.world_size, False, limit, wait_for_workers=False
    )
    group, _ = c10d._new_process_group_helper(
        info.world_size,
        rank,
        [],
        dist.Backend(info.backend),
        dist.PrefixStore(info.name, store),
        group_name=info.name,
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(info.world_size)}
    return group


def _open_shared(handle: str) -> torch.Tensor:
    rebuild, arguments = pickle.loads(base64.b64decode(handle))
    if rebuild.__name__ == "rebuild_cuda_tensor":
        # The number of a device may differ between processes, its uuid does not.
        uuids = [
            str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
        ]
        arguments = (*arguments[:6], uuids.index(arguments[6]), *arguments[7:])
    return rebuild(*arguments)
