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
import pickle
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from vllm.distributed.device_communicators import shm_broadcast
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

from .in_place import InPlaceUpdates
from .vllm_outputs import hold_outputs

logger = init_logger("vllm.agentrl")

BACKEND = "agentrl"
OPEN_MEMORIES = 2
"""The shared memories that take turns."""
WAIT_MS = 2
"""How long a process sleeps at most before it looks for a message again."""


def register() -> None:
    """What vLLM calls in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WeightEngine)
        hold_outputs()
    if current_platform.is_cpu():
        _wait_without_spinning()


def _wait_without_spinning() -> None:
    """Let processes that wait for each other sleep.

    After each message they look for the next one for a second without a pause. On a CPU that takes
    the cores from whoever computes, the learner included. They sleep until they are called, but for
    a moment only: vLLM loses calls, which its looking makes up for.
    """
    condition = getattr(shm_broadcast, "SpinCondition", None)
    if condition is None or condition.__init__.__defaults__ is None:
        return
    condition.__init__.__defaults__ = (0.0,)  # busy_loop_s
    wait = condition.wait

    def wait_a_moment(self: Any, timeout_ms: int | None = None) -> None:
        wait(self, WAIT_MS if timeout_ms is None else min(timeout_ms, WAIT_MS))

    condition.wait = wait_a_moment


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


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket: what is in it, and the group or the memory that it comes through."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group: str | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    abandon: bool = False


class WeightEngine(WeightTransferEngine[GroupInfo, BucketInfo]):
    """Receives flat buckets, and loads their tensors or copies them (see `in_place`)."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

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
        """Receive one bucket and load or copy it."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """See `update_weights`."""
        if update_info.abandon:
            raise RuntimeError("the update is abandoned")  # which closes it, in the worker's books
        dtypes = [getattr(torch, name) for name in update_info.dtypes]
        counts = [torch.Size(shape).numel() for shape in update_info.shapes]
        sizes = [n * dtype.itemsize for n, dtype in zip(counts, dtypes, strict=True)]
        flat = self._receive(update_info, sum(sizes))
        parts = flat.split(sizes)
        fields = zip(update_info.names, dtypes, update_info.shapes, parts, strict=True)
        tensors = [(name, part.view(dtype).view(shape)) for name, dtype, shape, part in fields]
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

    def _receive(self, info: BucketInfo, nbytes: int) -> torch.Tensor:
        if info.group is not None:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            dist.broadcast(flat, src=0, group=self._groups[info.group])
            return flat
        # In a load, a layer keeps its tensors until all of them are there, and the memory is
        # written again for a later bucket: hence the copy.
        return self._open(info.memory)[:nbytes].to(self.device, copy=not self._updates.copies)

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
