"""The server of a GPU benchmark: a model of some shape with random weights, options, versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from shapes import save_folder

from agentrl.config import Config

__all__ = ["OPTIONS", "server_config", "versions"]

GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {
        "load_format": "dummy",
        "max_num_batched_tokens": 16384,
        "gpu_memory_utilization": 0.6,
        "compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES},
    },
    "sglang": {
        "load_format": "dummy",
        "mem_fraction_static": 0.6,
        "sampling_backend": "pytorch",
        "chunked_prefill_size": 16384,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": GRAPH_SIZES,
    },
}
"""Of the server, by their long names; the engine in its own process gets the same."""


def server_config(
    kind: str,
    shape: str,
    folder: Path,
    *,
    engine: dict[str, Any],
    rollout: dict[str, Any] | None = None,
) -> Config:
    """The configuration of a server of `kind` with a model of `shape`.

    Args:
        kind: vllm or sglang.
        shape: one of `shapes.SHAPES`.
        folder: where the model is written.
        engine: more of the section `engine`; its `extra` replaces `OPTIONS`.
        rollout: the section `rollout`.
    """
    model = {"path": str(save_folder(shape, folder / "model")), "dtype": "bfloat16"}
    section = {"kind": kind, "extra": OPTIONS[kind]} | engine
    return Config.model_validate(
        {"agent": "benchmark", "model": model, "engine": section, "rollout": rollout or {}}
    )


def versions(python: str | Path | None, names: list[str]) -> dict[str, str]:
    """Of the packages among `names` that this Python has; None: the one that runs this."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    found = {}
    for name in names:
        command = [python or sys.executable, "-c", code, name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            found[name] = done.stdout.strip()
    return found
