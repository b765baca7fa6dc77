"""vLLM, spoken to over its token and weight routes (0.26 and later).

The server needs `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out` (where it has that), processed
log-probabilities, and for every transport but `disk` the plugin of `vllm_plugin.py`;
`launch.vllm_launch` gives all that.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from agentrl.engines.base import PauseMode
from agentrl.engines.engine_stats import MetricNames
from agentrl.engines.http import RequestRefusedError
from agentrl.engines.remote import RemoteEngine
from agentrl.engines.server_code import install_code
from agentrl.engines.transport.base import GroupAddress
from agentrl.engines.transport.buckets import TensorSpec
from agentrl.engines.transport.shared_memory import SharedBuffer, share_parts
from agentrl.engines.vllm_tokens import VLLMTokens
from agentrl.errors import EngineError

__all__ = ["VLLMEngine", "install_plugin"]

PLUGIN = "agentrl_vllm_plugin"
ID_PREFIX = "generate-tokens-"
"""vLLM puts it before the ids of requests that came in as tokens."""
ENDING_SECONDS = 3.0
"""After which a server has ended a request whose connection was closed."""
RECEIVE_PART = "agentrl_receive_part"
"""A method that the plugin gives to vLLM's workers."""


def install_plugin(folder: Path) -> Path:
    """Write the plugin as an installed distribution; returns the folder for PYTHONPATH.

    vLLM finds plugins by the entry points of distributions. The server may run in an environment
    without agentrl, so a package of few files and its metadata are put where only the server looks.
    """
    install_code(folder, PLUGIN, "vllm_plugin.py", "vllm_outputs.py", "vllm_cpu.py")
    metadata = folder / f"{PLUGIN}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    entry = f"[vllm.general_plugins]\nagentrl = {PLUGIN}:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    return folder


class VLLMEngine(RemoteEngine):
    """One vLLM server; see `RemoteEngine`. `api_servers` is how many of its processes answer."""

    token_route = VLLMTokens
    metric_names = MetricNames(
        ttft="vllm:time_to_first_token_seconds",
        tpot="vllm:request_time_per_output_token_seconds",
        kv_usage="vllm:kv_cache_usage_perc",
        preemptions="vllm:num_preemptions_total",
        counts_preemptions="vllm:num_preemptions_total",
    )

    def __init__(self, *, api_servers: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        self._api_servers = api_servers
        self._adapters = 0
        self._update_of_parts: dict[str, Any] | None = None
        """The update that has begun, if its parts open and close it."""

    async def load_folder(self, folder: Path) -> None:
        """Reload from safetensors."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._client.post("/collective_rpc", call)

    async def load_adapter(self, folder: Path) -> None:
        """Load an adapter under a name of its own, and forget the name of the last one.

        Loading in place under one name would have every step read the folder again. Requests keep
        the adapter that they began with, so that none may be in flight.
        """
        self._adapters += 1
        name = f"agentrl-{self._adapters}"
        await self._client.post(
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}
        )
        previous, self._adapter = self._adapter, name
        if previous is not None:
            with contextlib.suppress(RequestRefusedError):  # it was started again meanwhile
                await self._client.post("/v1/unload_lora_adapter", {"lora_name": previous})

    async def begin_update(self, calls: int | None = None) -> None:
        """Open an update; one that a failure left open is thrown away first."""
        self._update_of_parts = None
        if calls is not None:
            self._update_of_parts = {"update": uuid.uuid4().hex, "parts": calls}
            return
        try:
            await self._client.post("/start_weight_update")
        except RequestRefusedError:
            nothing = {"buckets": [], "abandon": True}
            with contextlib.suppress(RequestRefusedError):  # the plugin's way to close an update
                await self._client.post("/update_weights", {"update_info": nothing})
            await self._client.post("/start_weight_update")

    async def end_update(self) -> None:
        """Close the update, unless its last part has done so."""
        if self._update_of_parts is None:
            await self._client.post("/finish_weight_update", {})

    async def join_group(self, group: GroupAddress, rank_offset: int) -> None:
        """Have every worker join."""
        info = {
            "name": group.name,
            "backend": group.backend,
            "host": group.host,
            "port": group.port,
            "world_size": group.world_size,
            "rank_offset": rank_offset,
            "timeout": group.timeout,
        }
        await self._client.post("/init_weight_transfer_engine", {"init_info": info})

    async def leave_group(self, name: str) -> None:
        """Have every worker leave."""
        info = {"name": name, "leave": True}
        await self._client.post("/init_weight_transfer_engine", {"init_info": info})

    async def receive_broadcasts(self, buckets: Sequence[Sequence[TensorSpec]], group: str) -> None:
        """Have every worker take part in the broadcasts."""
        await self._receive(buckets, {"group": group})

    async def receive_shared(self, specs: Sequence[TensorSpec], buffer: SharedBuffer) -> None:
        """Have every worker read the buffer, which it opens once."""
        memory = {"name": buffer.name, "handle": share_parts(buffer.flat)}
        await self._receive([specs], {"memory": memory})

    async def checksums(self) -> Mapping[str, str]:
        """SHA-256 of each parameter, by worker and name. Layers packed for a CPU count as empty."""
        try:
            answer = await self._client.post("/weight_checker", {"action": "checksum"})
        except RequestRefusedError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
            raise EngineError(
                f"{self.label} is too old to give checksums of its weights: set "
                "engine.verify_weights false, or install a newer vLLM"
            ) from error
        checksums: Mapping[str, str] = answer["checksums"]
        return checksums

    async def flush_cache(self) -> None:
        """Forget every cached prefix; requests in flight compute theirs again.

        Raises:
            EngineError: the server still holds some.
        """
        answer = await self._client.post(
            "/reset_prefix_cache", params={"reset_running_requests": "true"}, repeatable=True
        )
        if answer is not None and not answer["success"]:
            raise EngineError(f"{self.label} did not drop its prefix cache: update again")

    async def forget_prefixes(self, salt: str) -> None:
        """Give requests another salt; flush the cache if some may be held that began before.

        Flushing takes longer the more blocks the cache has, and the server waits for it.
        """
        self._cache_salt = salt
        if self._paused:
            await self.flush_cache()

    async def _receive(
        self, buckets: Sequence[Sequence[TensorSpec]], source: Mapping[str, Any]
    ) -> None:
        specs = [[(spec.name, spec.dtype, spec.shape) for spec in specs] for specs in buckets]
        call: dict[str, Any] = {"update_info": {"buckets": specs, **source}}
        path = "/update_weights"
        if self._update_of_parts is not None:
            path = "/collective_rpc"
            call = {"method": RECEIVE_PART, "kwargs": call | self._update_of_parts}
        # It may last as long as the whole update.
        limit = self._update.timeout
        await self._client.post(path, call, limit=limit, sent=self._read_due_metrics)

    async def _abort(self, request_id: str) -> None:
        if self._api_servers > 1:
            # Only the one that has the request could end it, and none can be chosen. That one ends
            # it by itself, since its connection is closed, but says nothing.
            await asyncio.sleep(ENDING_SECONDS)
            return
        body = {"request_ids": [ID_PREFIX + request_id]}
        await self._client.post("/abort_requests", body, repeatable=True)

    async def _pause(self, mode: PauseMode) -> None:
        await self._client.post("/pause", params={"mode": mode, "clear_cache": "false"})

    async def _resume(self) -> None:
        await self._client.post("/resume", repeatable=True)

    async def _label(self, version: int) -> None:
        await self._label_tokens({"new_version": str(version)})

    async def _sleep(self, level: int) -> None:
        await self._client.post("/sleep", params={"level": level})

    async def _wake(self, tag: str) -> None:
        await self._client.post("/wake_up", params={"tags": tag})
