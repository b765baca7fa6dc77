"""SGLang, spoken to over its native routes (0.5.17 and later).

What it does differently: an id outside the vocabulary ends the server, so ids are checked before;
its own end-of-sequence tokens always end a turn; log-probabilities are those before top-p and
top-k, so that asking for them together with either is refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch

from agentrl.engines.answer import Place
from agentrl.engines.base import PauseMode
from agentrl.engines.engine_stats import MetricNames
from agentrl.engines.http import RequestRefusedError
from agentrl.engines.remote import RemoteEngine
from agentrl.engines.server_code import install_code
from agentrl.engines.sglang_tokens import SGLangTokens
from agentrl.engines.siblings import Sibling, Siblings
from agentrl.engines.transport.base import GroupAddress
from agentrl.engines.transport.buckets import TensorSpec
from agentrl.engines.transport.shared_memory import SharedBuffer, share
from agentrl.errors import EngineError

__all__ = ["LOADER", "SGLangEngine", "install_loader"]

logger = logging.getLogger(__name__)

PACKAGE = "agentrl_sglang_loader"
LOADER = f"{PACKAGE}.load"
"""What a server that has our loader calls it."""

FREEZE_SECONDS = 10.0
"""How long a server may take to keep what it has loaded from its garbage collectors."""
FLUSH_SECONDS = 10
"""How long a server may take to be rid of requests that stand in the way of a flush."""

# Whoever updates decides itself what happens to requests and to the cache.
UNTOUCHED = {"flush_cache": False, "abort_all_requests": False}


def install_loader(folder: Path) -> Path:
    """Write our loader of weights where a server finds it; returns the folder for PYTHONPATH."""
    return install_code(folder, PACKAGE, "sglang_loader.py")


class SGLangEngine(RemoteEngine):
    """One SGLang server; see `RemoteEngine`.

    Args:
        has_loader: whether the server knows `LOADER`.
        api_servers: how many of its processes answer.
        shared_prefill_tokens: prompts of at least so many tokens are computed once for a group that
            comes together (see `siblings`); 0: none.
    """

    token_route = SGLangTokens
    metric_names = MetricNames(
        ttft="sglang:time_to_first_token_seconds",
        tpot="sglang:request_time_per_output_token_seconds",
        kv_usage="sglang:token_usage",
        preemptions="sglang:num_retracted_requests_total",  # listed after the first one
        counts_preemptions="sglang:num_retracted_reqs",
    )

    def __init__(
        self,
        *,
        has_loader: bool = False,
        api_servers: int = 1,
        shared_prefill_tokens: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._has_loader, self._api_servers = has_loader, api_servers
        self._shared_prefill_tokens = shared_prefill_tokens
        self._siblings = Siblings()
        self._knows_sessions = True
        """Whether the server opens and closes updates, as far as it has said."""
        self._update_id = ""
        self._calls: int | None = None
        """How many parts this update has, if that is known."""
        self._loading = False
        """Whether our loader has been given a part of this update."""

    async def start(self) -> None:
        """See `RemoteEngine`."""
        await super().start()
        await self._freeze_heaps()

    async def restart(self) -> None:
        """See `RemoteEngine`."""
        await super().restart()
        await self._freeze_heaps()

    async def load_folder(self, folder: Path) -> None:
        """Reload from safetensors."""
        body = {"model_path": str(folder), **UNTOUCHED}
        await self._client.post("/update_weights_from_disk", body)

    async def begin_update(self, calls: int | None = None) -> None:
        """Open an update, where the server knows sessions; one left open is closed first."""
        self._update_id, self._calls, self._loading = uuid.uuid4().hex, calls, False
        if not self._knows_sessions:
            return
        try:
            await self._client.post("/begin_weight_update", {"selector": "all"})
        except RequestRefusedError as error:
            if error.status == httpx.codes.NOT_FOUND:
                self._knows_sessions = False
                return
            await self._client.post("/end_weight_update", {})
            await self._client.post("/begin_weight_update", {"selector": "all"})

    async def end_update(self) -> None:
        """Close the update."""
        if self._loading and self._calls is None:
            await self._give_to_loader([])
        if self._knows_sessions:
            await self._client.post("/end_weight_update", {})

    async def join_group(self, group: GroupAddress, rank_offset: int) -> None:
        """Have every tensor-parallel rank join."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._client.post("/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        """Have every rank leave."""
        await self._client.post("/destroy_weights_update_group", {"group_name": name})

    async def receive_broadcasts(self, buckets: Sequence[Sequence[TensorSpec]], group: str) -> None:
        """Have every rank take part in the broadcasts, each of which SGLang wants announced."""
        for specs in buckets:
            body = {
                "names": [spec.name for spec in specs],
                "dtypes": [spec.dtype for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "group_name": group,
                "load_format": "flattened_bucket",
                **UNTOUCHED,
            }
            path = "/update_weights_from_distributed"
            await self._client.post(path, body, sent=self._read_due_metrics)

    async def receive_shared(self, specs: Sequence[TensorSpec], buffer: SharedBuffer) -> None:
        """Have every rank read the buffer."""
        if self._has_loader:
            content = {
                "update": self._update_id,
                "parts": self._calls,
                "specs": [[spec.name, spec.dtype, spec.shape] for spec in specs],
            }
            self._loading = True
            flat = buffer.flat[: sum(spec.nbytes for spec in specs)]
            await self._give_to_loader([(json.dumps(content), flat)])
            return
        metadata = []
        start = 0
        for spec in specs:
            end = start + spec.nbytes
            metadata.append(
                SimpleNamespace(
                    name=spec.name,
                    shape=spec.shape,
                    dtype=getattr(torch, spec.dtype),
                    start_idx=start,
                    end_idx=end,
                    numel=spec.nbytes,
                )
            )
            start = end
        bucket = {"flattened_tensor": buffer.flat[:start], "metadata": metadata}
        await self._post_tensors(bucket, "flattened_bucket")

    async def checksums(self) -> Mapping[str, str]:
        """A hash of each parameter, by rank and name."""
        answer = await self._client.post("/weights_checker", {"action": "checksum"})
        return {
            f"rank{rank}:{name}": value
            for rank, payload in enumerate(answer["ranks"])
            for name, value in payload["checksums"].items()
        }

    async def flush_cache(self) -> None:
        """Forget every cached prefix. Requests that stand in the way are ended with their tokens.

        Raises:
            EngineError: the server still holds some.
        """
        try:
            await self._client.post("/flush_cache", repeatable=True)
        except RequestRefusedError:
            await self._client.post("/abort_request", {"abort_all": True})
            await self._gate.wait_idle()
            patience = {"timeout": str(FLUSH_SECONDS)}  # what was ended may take a step more
            await self._client.post("/flush_cache", params=patience, repeatable=True)
        self._siblings.forget()

    async def _freeze_heaps(self) -> None:
        """Keep what a server of ours has loaded from its garbage collectors (see `agentrl.heap`).

        Those that sample hear of it for certain; of several processes that answer, any may take a
        connection, so that not each of them may. A server that fails to is only slower.
        """
        if self.server is None:
            return
        post = partial(self._client.post, "/freeze_gc", limit=FREEZE_SECONDS)
        posts = (post() for _ in range(self._api_servers))
        for answer in await asyncio.gather(*posts, return_exceptions=True):
            if isinstance(answer, EngineError):
                logger.warning(
                    "garbage collections may stop %s now and then: %s", self.label, answer
                )
            elif isinstance(answer, BaseException):
                raise answer

    async def _sibling(self, prompt_tokens: int, place: Place) -> Sibling:
        if not (place.group_id and self._shared_prefill_tokens):
            return Sibling()
        begins = self._siblings.begins(place.rollout_id)
        if not begins or prompt_tokens < self._shared_prefill_tokens:
            return Sibling()
        while True:
            cache = self._incarnation, self._cache_salt
            sibling = await self._siblings.join((*cache, place.replica, place.group_id))
            try:
                await self._gate.enter()
            except BaseException:
                sibling.end()
                raise
            if cache == (self._incarnation, self._cache_salt):
                return sibling
            sibling.end()  # it waited for a prompt of other weights

    async def _give_to_loader(self, buckets: list[tuple[str, torch.Tensor]]) -> None:
        await self._post_tensors(buckets, LOADER)

    async def _post_tensors(self, content: object, load_format: str) -> None:
        body = {
            "serialized_named_tensors": [share(content)] * self.num_weight_ranks,
            "load_format": load_format,
            **UNTOUCHED,
        }
        path = "/update_weights_from_tensor"
        await self._client.post(path, body, sent=self._read_due_metrics)

    async def _abort(self, request_id: str) -> None:
        await self._client.post("/abort_request", {"rid": request_id}, repeatable=True)

    async def _pause(self, mode: PauseMode) -> None:
        # Held requests give their cache back, so that it can be flushed; under `wait` there are
        # none.
        native = "abort" if mode == "abort" else "retract"
        await self._client.post("/pause_generation", {"mode": native})

    async def _resume(self) -> None:
        await self._client.post("/continue_generation", {})

    async def _label(self, version: int) -> None:
        await self._label_tokens({"new_version": str(version), "abort_all_requests": False})

    async def _sleep(self, level: int) -> None:
        # Whether weights are kept on the host is decided when the server starts.
        await self._client.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
        self._siblings.forget()

    async def _wake(self, tag: str) -> None:
        await self._client.post("/resume_memory_occupation", {"tags": [tag]})
