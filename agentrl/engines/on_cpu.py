"""What servers are started with where there is no GPU; `engine.extra` and `engine.env` win."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["SGLANG_ENV", "VLLM_ENV", "VLLM_OPTIONS", "has_gpu", "sglang_options"]

VLLM_OPTIONS: Mapping[str, Any] = {
    "enforce_eager": True,  # compiling takes minutes and a C++ compiler
    "block_size": 32,  # the least that a CPU can; 128, its default, finds few shared prefixes
    "kv_cache_memory_bytes": 2 << 30,
}

VLLM_ENV: Mapping[str, str] = {
    # Its own choice ties every server, and all its threads, to the same first cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

SGLANG_ENV: Mapping[str, str] = {"SGLANG_USE_CPU_ENGINE": "1"}

GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def has_gpu() -> bool:
    """True where a server that starts on this host would find a GPU.

    The engine's torch may be another build than ours, so that ours alone cannot say.
    """
    if torch.cuda.is_available() or shutil.which("nvidia-smi") is not None:
        return True
    return any(driver.exists() for driver in GPU_DRIVERS)


def sglang_options(max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    """SGLang's options; its cache holds every running request at full length, and as much again."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,  # its scheduler would take a core from the learner
        "mem_fraction_static": 0.3,
        "max_total_tokens": 2 * max_num_seqs * max_model_len,
    }
