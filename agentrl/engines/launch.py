"""Command lines of the servers, as functions of the configuration."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config import EngineConfig
from agentrl.config_engine import VLLM_LORA_RANKS
from agentrl.engines import on_cpu, sglang
from agentrl.engines.installed import knows_option

__all__ = [
    "SGLANG_POLICY",
    "Launch",
    "max_running_requests",
    "server_options",
    "sglang_launch",
    "vllm_launch",
]

OWN_SOCKETS = "enable_http_worker_reuseport"
"""Of SGLang's processes, else one takes most connections; it does not go with HTTP/2."""
SGLANG_SPARE_TOKENS = 8
"""SGLang keeps a few tokens of its context for itself; the prompt may be 6 shorter than it."""
SGLANG_SPARE_REQUESTS = 1
"""While it computes a prompt in parts, SGLang 0.5.17 counts that request twice: one fewer would run
than it was allowed, and of as many requests at once the last began when all others had ended."""
SGLANG_POLICY = "lpm"
"""Longest prefix first: of a group that comes at once few compute the prompt, since the others come
after all that share nothing; in the order of arrival most do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line without the port, which follows `--port`, and its environment."""

    command: tuple[str, ...]
    env: Mapping[str, str]

    def with_port(self, port: int) -> list[str]:
        """The whole command line."""
        return [*self.command, "--port", str(port)]


def server_options(options: Mapping[str, Any]) -> list[str]:
    """Options as flags: true a bare flag, false `--no-` before it, lists as several values.

    >>> server_options({"enforce_eager": True, "sizes": [1, 2], "config": {"mode": 3}})
    ['--enforce-eager', '--sizes', '1', '2', '--config', '{"mode": 3}']
    """
    flags: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            flags += [f"--{name}", *(str(item) for item in value)]
        elif isinstance(value, Mapping):
            flags += [f"--{name}", json.dumps(value)]
        else:
            flags += [f"--{name}", str(value)]
    return flags


def vllm_launch(
    config: EngineConfig,
    model: str,
    *,
    dtype: str,
    max_model_len: int,
    plugin: Path,
    gpu: bool = True,
    lora_rank: int = 0,
    seed: int = 0,
    tells_experts: bool = False,
) -> Launch:
    """Start vLLM with the routes of tokens and weights; `plugin` holds our weight engine.

    `seed` begins the random numbers of the server. With `lora_rank`, adapters up to that rank are
    loaded beside the model, one at a time; with `tells_experts`, answers say where tokens went.
    """
    options: dict[str, Any] = {
        "host": config.host,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": seed,
        "enable_prompt_tokens_details": True,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": "agentrl"},
        "disable_uvicorn_access_log": True,  # a line for each of many thousand requests
    }
    if knows_option("vllm", _python(config), config.env, "enable_scale_out"):
        options["enable_scale_out"] = True  # opens the route for tokens, which was open before
    if not gpu:
        options |= on_cpu.VLLM_OPTIONS
    if config.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = config.tensor_parallel_size
    if config.data_parallel_size > 1:
        options["data_parallel_size"] = config.data_parallel_size
    if config.data_parallel_size > 1 or config.api_server_count > 1:
        options["api_server_count"] = config.api_server_count  # by default one for each replica
    if config.enable_sleep:
        options["enable_sleep_mode"] = True
    if tells_experts:
        options["enable_return_routed_experts"] = True
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not gpu:
        env |= on_cpu.VLLM_ENV
    if lora_rank:
        room = min(rank for rank in VLLM_LORA_RANKS if rank >= lora_rank)
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.api_key is not None:
        env["VLLM_API_KEY"] = config.api_key
    env |= config.env | _python_path(config, plugin)
    command = [_python(config), "-m", "vllm.entrypoints.cli.main", "serve", model]
    return Launch((*command, *server_options(options | config.extra)), env)


def sglang_launch(
    config: EngineConfig,
    model: str,
    *,
    dtype: str,
    max_model_len: int,
    gpu: bool = True,
    loader: Path | None = None,
    seed: int = 0,
    tells_experts: bool = False,
) -> Launch:
    """Start SGLang with its metrics and the count of cached tokens; the rest as for vLLM.

    `loader` is a folder with our loader of weights, which the server is then told of.
    """
    options: dict[str, Any] = {
        "model_path": model,
        "host": config.host,
        "dtype": dtype,
        "context_length": max_model_len + SGLANG_SPARE_TOKENS,
        "max_running_requests": max_running_requests(config),
        "random_seed": seed,
        "schedule_policy": SGLANG_POLICY,
        "enable_metrics": True,
        "enable_cache_report": True,
        "log_level_http": "warning",  # else a line for each of many thousand requests
    }
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if not gpu:
        options |= on_cpu.sglang_options(config.max_num_seqs, max_model_len)
        env |= on_cpu.SGLANG_ENV
    if config.tensor_parallel_size > 1:
        options["tp_size"] = config.tensor_parallel_size
    if config.transport == "nccl":
        # SGLang switches it off for itself; NCCL then fails to reach the learner's memory.
        env["NCCL_CUMEM_ENABLE"] = os.environ.get("NCCL_CUMEM_ENABLE", "1")
    if config.data_parallel_size > 1:
        options["dp_size"] = config.data_parallel_size
    if config.api_server_count > 1:
        options["tokenizer_worker_num"] = config.api_server_count
        # Each would send a request to try itself, long after the others answer: an update would
        # meet it, or a sleeping server.
        options["skip_server_warmup"] = True
        http2 = config.extra.get("enable_http2", False)
        if not http2 and knows_option("sglang", _python(config), config.env, OWN_SOCKETS):
            options[OWN_SOCKETS] = True
    if tells_experts:
        options["enable_return_routed_experts"] = True
    if config.enable_sleep:
        options["enable_memory_saver"] = True
        if config.sleep_level == 1:
            options["enable_weights_cpu_backup"] = True
    if config.api_key is not None:
        options["api_key"] = config.api_key
    env |= config.env
    # Few of SGLang's flags have a `--no-`: one that is not wanted is left out.
    options = {k: v for k, v in (options | config.extra).items() if v is not False}
    if loader is not None:
        env |= _python_path(config, loader)
        theirs = options.get("custom_weight_loader", ())
        others = [theirs] if isinstance(theirs, str) else theirs
        options["custom_weight_loader"] = [sglang.LOADER, *others]
    command = [_python(config), "-m", "sglang.launch_server"]
    return Launch((*command, *server_options(options)), env)


def max_running_requests(config: EngineConfig) -> int:
    """SGLang's name for the most requests at once, of all replicas together."""
    return config.max_num_seqs + SGLANG_SPARE_REQUESTS * config.data_parallel_size


def _python_path(config: EngineConfig, folder: Path) -> dict[str, str]:
    """`folder` before what the server would find anyway."""
    paths = [str(folder), config.env.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _python(config: EngineConfig) -> str:
    return str(config.python) if config.python is not None else sys.executable
