"""The section `engine`: what samples, and how its servers are started, reached and updated.

A setting that the chosen kind has no use for, or that cannot work with another, is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentrl.config_base import NonNegativeInt, PositiveFloat, PositiveInt, Section

__all__ = ["LOOPBACK", "SERVER_KINDS", "EngineConfig", "refuse_temperature"]

SERVER_KINDS = ("vllm", "sglang")
"""Engines that are servers of their own and start from a model folder."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

TEMPERATURES: Mapping[str, tuple[float, float]] = {"vllm": (0.01, 2.0), "sglang": (1e-6, math.inf)}
"""The temperatures above 0 at which each server samples as asked: vLLM takes lower ones for 0.01
and refuses higher ones, SGLang takes lower ones for 0."""

VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for."""

OWN_OPTIONS: Mapping[str, str] = {
    "host": "engine.host",
    "port": "none: every start takes a free one",
    "model": "model.path",
    "model_path": "model.path",
    "dtype": "model.dtype",
    "api_key": "engine.api_key",
    "max_model_len": "engine.max_model_len",
    "context_length": "engine.max_model_len",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "tp_size": "engine.tensor_parallel_size",
    "tp": "engine.tensor_parallel_size",
    "data_parallel_size": "engine.data_parallel_size",
    "dp_size": "engine.data_parallel_size",
    "dp": "engine.data_parallel_size",
    "pipeline_parallel_size": "engine.tensor_parallel_size",
    "pp_size": "engine.tensor_parallel_size",
    "api_server_count": "engine.api_server_count",
    "tokenizer_worker_num": "engine.api_server_count",
    "logprobs_mode": "none: the learner needs those of the sampling distribution",
    "weight_transfer_config": "engine.transport",
    "enable_sleep_mode": "engine.enable_sleep",
    "enable_memory_saver": "engine.enable_sleep",
    "enable_lora": "engine.lora",
}
"""Options that agentrl counts on, with what to use in place of `engine.extra`."""


_ADAPTER_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "transport": ("auto", "disk"),
    "pause_mode": ("auto", "abort", "wait"),
    "bucket_mb": (512,),
    "verify_weights": (False,),
    "sleep_level": (1,),
    "data_parallel_size": (1,),
    "api_server_count": (1,),
}
"""What an adapter that travels alone can go with."""


class EngineConfig(Section):
    """What samples: the model in this process, or vLLM and SGLang servers."""

    kind: Literal["transformers", "vllm", "sglang", "scripted"] = "transformers"
    max_num_seqs: PositiveInt = 64
    """How many requests one engine samples at once; others wait. (SGLang may take one more.)"""
    max_model_len: PositiveInt | None = None
    """Most tokens of one request, prompt and response; without it, `rollout.max_tokens`."""
    deterministic: bool = True
    """Kind `transformers`: batches do not depend on timing, so that a run repeats bit for bit."""
    script: Path | None = None
    """For kind `scripted`: a text file, one response a line, said in turn."""

    num_engines: PositiveInt = 1
    """Servers to start."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share the layers of one engine; with `urls`, what those servers have."""
    data_parallel_size: PositiveInt = 1
    """Replicas inside one server, each with a prefix cache of its own; likewise."""
    api_server_count: PositiveInt = 1
    """Processes of one server that read requests and write answers, where one is the limit."""
    shared_prefill_tokens: NonNegativeInt = 0
    """SGLang: first prompts of at least so many tokens are computed once for a group that comes
    together, whose other members wait for that; 0: each computes what it does not find."""
    gpus: tuple[int, ...] = ()
    """GPUs of this host that the servers share out among them; without it, each sees all."""
    python: Path | None = None
    """Python of the servers' virtual environment; without it, the one that runs agentrl."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the servers."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Any option of the server, by its long name: true gives the bare flag, false `--no-` and the
    flag (SGLang, where most flags have no such form: nothing), tables become JSON."""
    urls: tuple[str, ...] = ()
    """Servers that run already; none is started or ended."""
    router_url: str | None = None
    """sglang-router before the servers at `urls`: requests for tokens go through it, everything
    else to the servers themselves."""
    host: str = "127.0.0.1"
    """Address that the servers listen on and, with `urls` on other hosts, that of the learner as
    they reach it."""
    api_key: str | None = None
    start_timeout: PositiveFloat = 600.0
    """Seconds until a server must answer."""
    request_timeout: PositiveFloat = 1800.0
    """Seconds for one request."""
    update_timeout: PositiveFloat = 600.0
    """Seconds for one transfer of the weights."""
    max_restarts: NonNegativeInt = 3
    """How often one server is started again after it died."""
    transport: Literal["auto", "disk", "gloo", "nccl", "ipc"] = "auto"
    """How weights travel; `auto` takes ipc on one GPU host, nccl between hosts, gloo on a CPU."""
    bucket_mb: PositiveInt = 512
    """Weights are gathered and sent in buckets of this size; two exist at a time."""
    verify_weights: bool = False
    """Compare checksums after each transfer. Slow."""
    lora: Literal["auto", "adapter", "merged"] = "auto"
    """What of a LoRA run travels: the adapter alone, through a folder that the servers see, or all
    weights with it merged in; `auto`: the adapter where kind is vllm, the only one that takes it.
    """
    pause_mode: Literal["auto", "abort", "wait", "keep"] = "auto"
    """What a weight update does with requests in flight; `auto` keeps them, and aborts them where
    an adapter travels, since vLLM's requests keep the one that they began with."""
    enable_sleep: bool = False
    """Give the GPU to the learner between rollouts (learner and engine on the same GPUs)."""
    sleep_level: Literal[1, 2] = 1
    """1 keeps the weights in host memory, 2 drops them: the next update brings them."""

    @field_validator("extra")
    @classmethod
    def _spell_with_underscores(cls, extra: dict[str, Any]) -> dict[str, Any]:
        """One spelling of each option, so that one which is looked for is found."""
        spelled = {key.replace("-", "_"): value for key, value in extra.items()}
        if len(spelled) < len(extra):
            twice = next(key for key in extra if "-" in key and key.replace("-", "_") in extra)
            raise ValueError(f"names {twice} twice, with - and with _: name it once")
        return spelled

    @model_validator(mode="after")
    def _check_combinations(self) -> EngineConfig:
        self._refuse_what_would_be_ignored()
        self._check_urls()
        needed = self.num_engines * self.tensor_parallel_size * self.data_parallel_size
        if self.gpus and len(self.gpus) != needed:
            raise ValueError(
                f"engine.gpus names {len(self.gpus)} GPUs, but num_engines x tensor_parallel_size "
                f"x data_parallel_size needs {needed}: name as many"
            )
        if self.kind == "sglang" and self.api_server_count > 1 and self.pause_mode == "abort":
            raise ValueError(
                "engine.api_server_count > 1 with engine.pause_mode abort: of several processes of "
                "SGLang each waits only for its own requests to end; set pause_mode to keep or wait"
            )
        if self.kind == "sglang" and self.api_server_count > 1 and self.api_key is not None:
            raise ValueError(
                "engine.api_server_count > 1 with engine.api_key: several processes of SGLang know "
                "no key; set api_server_count to 1, or leave the key out"
            )
        if self.sleep_level != 1 and not self.enable_sleep:
            raise ValueError("engine.sleep_level would be ignored: set engine.enable_sleep too")
        given = sorted(OWN_OPTIONS.keys() & self.extra.keys())
        if given:
            raise ValueError(
                f"engine.extra.{given[0]} is an option that agentrl sets itself: "
                f"use {OWN_OPTIONS[given[0]]}"
            )
        if self.lora == "adapter":
            self.check_adapter()
        return self

    def check_adapter(self) -> None:
        """Raise ValueError where an adapter alone cannot be sent."""
        if self.kind != "vllm":
            raise ValueError(
                f"engine.lora adapter works with vllm only, not with {self.kind}: set it to merged"
            )
        for key, works in _ADAPTER_SETTINGS.items():
            value = getattr(self, key)
            if value not in works:
                raise ValueError(
                    f"engine.{key} {value} does not go with a LoRA adapter that travels alone: set "
                    f"it to {works[0]}, or engine.lora to merged"
                )

    def _refuse_what_would_be_ignored(self) -> None:
        if self.kind != "sglang":
            why = (
                f"engine.kind is {self.kind}, and only sglang computes a group's prompt repeatedly"
            )
            self._refuse_ignored("engine", {"shared_prefill_tokens"}, why)
        elif self.extra.get("disable_radix_cache", False):
            why = "engine.extra.disable_radix_cache leaves nothing to share"
            self._refuse_ignored("engine", {"shared_prefill_tokens"}, why)
        started = {"num_engines", "python", "env", "extra", "start_timeout", "max_restarts"}
        started |= {"gpus", "enable_sleep", "sleep_level", "api_server_count"}
        served = started | {"tensor_parallel_size", "data_parallel_size"}
        served |= {"urls", "api_key", "request_timeout", "update_timeout", "transport"}
        served |= {"router_url", "bucket_mb", "verify_weights", "pause_mode", "host"}
        if self.kind not in SERVER_KINDS:
            self._refuse_ignored(
                "engine", served, f"engine.kind is {self.kind}, which is no server"
            )
            return
        if self.urls:
            self._refuse_ignored("engine", started, "engine.urls names servers that run already")
        why = f"engine.kind is {self.kind}, whose batches depend on timing"
        self._refuse_ignored("engine", {"deterministic"}, why)

    def _check_router(self) -> None:
        if self.router_url is None:
            return
        if self.kind != "sglang":
            raise ValueError(
                "engine.router_url works with sglang only, since sglang-router has no route for "
                f"the tokens of {self.kind}: leave it out, agentrl chooses among servers itself"
            )
        if not self.urls:
            raise ValueError(
                "engine.router_url needs engine.urls, the servers behind the router: new weights "
                "go to them directly"
            )
        if self.router_url.rstrip("/") in {url.rstrip("/") for url in self.urls}:
            raise ValueError("engine.urls names the router: name the servers behind it")
        if self.data_parallel_size > 1:
            raise ValueError(
                "engine.router_url with engine.data_parallel_size > 1: the router drops the "
                "replica that a request names; put servers of one replica behind it"
            )

    def _check_urls(self) -> None:
        self._check_router()
        for url in (*self.urls, *filter(None, [self.router_url])):
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"{url!r} is no address of a server: write it as http://HOST:PORT")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("engine.urls names a server twice: name each once")


def refuse_temperature(kind: str, temperature: float) -> None:
    """Raise ValueError where an engine of this kind would sample at another temperature."""
    lowest, highest = TEMPERATURES.get(kind, (0.0, math.inf))
    if temperature != 0 and not lowest <= temperature <= highest:
        limits = f"from {lowest:g}" + (f" to {highest:g}" if highest < math.inf else "")
        raise ValueError(
            f"{kind} samples at temperatures {limits}, not at {temperature:g}: set "
            "rollout.temperature, or the agent's own, within that"
        )
