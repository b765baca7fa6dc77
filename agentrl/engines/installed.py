"""What the engine packages of another Python know, without importing them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import cache

__all__ = ["vllm_knows_option"]

_LOOK = """
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("vllm")
folder = pathlib.Path(spec.submodule_search_locations[0]) / "entrypoints" if spec else None
files = folder.rglob("cli_args.py") if folder else ()
print(any(sys.argv[1] in file.read_text() for file in files))
"""


def vllm_knows_option(python: str, env: Mapping[str, str], name: str) -> bool:
    """Whether `vllm serve` of that Python has an option; names are spelt with underscores.

    Newer versions need flags that older ones refuse. False where there is no vLLM, or no Python:
    starting the server says so.
    """
    return _look(python, env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")), name)


@cache
def _look(python: str, path: str, name: str) -> bool:
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, name],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError:
        return False
    return done.stdout.strip() == "True"
