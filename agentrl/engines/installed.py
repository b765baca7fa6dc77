"""The Python of the servers, and what its engine packages know, without importing them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache

from agentrl.config_engine import EngineConfig
from agentrl.errors import UsageError

__all__ = ["check_python", "vllm_knows_option"]

_LOOK = """
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("vllm")
folder = pathlib.Path(spec.submodule_search_locations[0]) / "entrypoints" if spec else None
files = folder.rglob("cli_args.py") if folder else ()
print(any(sys.argv[1] in file.read_text() for file in files))
"""


def check_python(config: EngineConfig) -> None:
    """Refuse an `engine.python` that is no program, before anything is built.

    Raises:
        UsageError: it is not there, or may not be executed.
    """
    if config.python is not None and shutil.which(config.python) is None:
        raise UsageError(
            f"engine.python {config.python} is no program that can be started: name the Python of "
            "the servers' virtual environment, as in /path/to/venv/bin/python"
        )


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
