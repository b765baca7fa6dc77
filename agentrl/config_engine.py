"""The section `engine`: what samples, and how its servers are started, reached and updated.

A setting that the chosen kind has no use for, or that cannot work with another, is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from agentrl.config_base import NonNegativeInt, PositiveFloat, PositiveInt, Section

__all__ = ["EngineConfig"]


class EngineConfig(Section):
    """What samples: the model in this process, or vLLM and SGLang servers."""

    kind: Literal["transformers", "vllm", "sglang", "scripted"] = "transformers"
    max_num_seqs: PositiveInt = 64
    """How many requests one engine samples at once; others wait."""
    max_model_len: PositiveInt | None = None
    """Most tokens of one request, prompt and response; without it, `rollout.max_tokens`."""
    deterministic: bool = True
    """Kind `transformers`: batches do not depend on timing, so that a run repeats bit for bit."""
    script: Path | None = None
    """For kind `scripted`: a text file, one response a line, said in turn."""

    num_engines: PositiveInt = 1
    """Servers to start."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share the layers of one engine."""
    data_parallel_size: PositiveInt = 1
    """Replicas inside one server, each with a prefix cache of its own."""
    gpus: tuple[int, ...] = ()
    """GPUs of this host that the servers share out among them; without it, each sees all."""
    python: Path | None = None
    """Python of the servers' virtual environment; without it, the one that runs agentrl."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the servers."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Any option of the server, by its long name: true gives the bare flag, tables become JSON."""
    urls: tuple[str, ...] = ()
    """Servers that run already; none is started or ended."""
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
    pause_mode: Literal["abort", "wait", "keep"] = "keep"
    """What a weight update does with requests in flight."""
    enable_sleep: bool = False
    """Give the GPU to the learner between rollouts (learner and engine on the same GPUs)."""
    sleep_level: Literal[1, 2] = 1
    """1 keeps the weights in host memory, 2 drops them: the next update brings them."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> EngineConfig:
        started = {"num_engines", "python", "env", "extra", "start_timeout", "max_restarts"}
        started |= {"tensor_parallel_size", "data_parallel_size", "gpus"}
        started |= {"enable_sleep", "sleep_level"}
        served = started | {"urls", "api_key", "request_timeout", "update_timeout", "transport"}
        served |= {"bucket_mb", "verify_weights", "pause_mode", "host"}
        if self.kind not in ("vllm", "sglang"):
            ignored, why = served, f"engine.kind is {self.kind}, which is no server"
        elif self.urls:
            ignored, why = started, "engine.urls names servers that run already"
        else:
            ignored, why = set(), ""
        self._refuse_ignored("engine", ignored, why)
        needed = self.num_engines * self.tensor_parallel_size * self.data_parallel_size
        if self.gpus and len(self.gpus) != needed:
            raise ValueError(
                f"engine.gpus names {len(self.gpus)} GPUs, but num_engines x tensor_parallel_size "
                f"x data_parallel_size needs {needed}: name as many"
            )
        if self.sleep_level != 1 and not self.enable_sleep:
            raise ValueError("engine.sleep_level would be ignored: set engine.enable_sleep too")
        return self
