"""Which transport a run uses."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import torch

from agentrl.config import EngineConfig
from agentrl.config_engine import LOOPBACK, SERVER_KINDS
from agentrl.engines.transport.base import WeightTransport
from agentrl.engines.transport.disk import DiskTransport
from agentrl.engines.transport.group import GroupTransport
from agentrl.engines.transport.ipc import IPCTransport
from agentrl.engines.transport.verified import VerifiedTransport
from agentrl.errors import UsageError

__all__ = ["check_transport", "make_transport", "transport_name"]


def transport_name(config: EngineConfig, *, on_gpu: bool) -> str:
    """Resolve `auto`: ipc where learner and engines share a host and GPUs, nccl between hosts.

    Raises:
        UsageError: the transport cannot work with the other settings.
    """
    hosts = [urlsplit(url).hostname or "" for url in config.urls]
    one_host = all(host in LOOPBACK for host in hosts)
    name: str = config.transport
    if name == "auto":
        name = "gloo" if not on_gpu else "ipc" if one_host else "nccl"
    if name == "nccl" and not on_gpu:
        raise UsageError("engine.transport nccl needs the learner on a GPU: use gloo or disk")
    if name == "ipc" and not one_host:
        raise UsageError("engine.transport ipc works on one host only: use nccl, gloo or disk")
    if name in ("gloo", "nccl") and config.kind == "sglang" and config.data_parallel_size > 1:
        raise UsageError(
            f"SGLang's data-parallel replicas cannot join one group for engine.transport {name}: "
            "use ipc or disk, or engine.num_engines instead of engine.data_parallel_size"
        )
    return name


def check_transport(config: EngineConfig) -> None:
    """Refuse what could not bring new weights to the servers, before anything is built.

    Raises:
        UsageError: the transport cannot work here, or the servers could not reach this machine.
    """
    if config.kind not in SERVER_KINDS:
        return
    name = transport_name(config, on_gpu=torch.cuda.is_available())
    elsewhere = [url for url in config.urls if urlsplit(url).hostname not in LOOPBACK]
    if name != "disk" and elsewhere and config.host in LOOPBACK:
        raise UsageError(
            f"engine.host is {config.host}, at which {elsewhere[0]} cannot reach the learner for "
            "new weights: set it to this machine's address, or engine.transport to disk"
        )


def make_transport(
    config: EngineConfig, *, folder: Path, model_folder: Path | None, host: str = "127.0.0.1"
) -> WeightTransport:
    """The transport of a run, checked against disk with `engine.verify_weights`.

    Args:
        config: The section `engine`.
        folder: Where the disk transport writes.
        model_folder: Whose configuration and tokenizer go beside weights on disk.
        host: An address of this process that every engine can reach.
    """
    name = transport_name(config, on_gpu=torch.cuda.is_available())
    disk = DiskTransport(folder, model_folder)
    if name == "disk":
        return disk
    transport: WeightTransport
    if name == "ipc":
        transport = IPCTransport()
    else:
        transport = GroupTransport(
            "nccl" if name == "nccl" else "gloo", host=host, timeout=config.update_timeout
        )
    return VerifiedTransport(transport, disk) if config.verify_weights else transport
