"""The Python of the servers, and what its engine packages know, without importing them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache

from agentrl.config_engine import EngineConfig
from agentrl.errors import UsageError

__all__ = ["check_python", "knows_option"]

_OPTIONS = {
    "vllm": ("entrypoints/**/cli_args.py",),
    "sglang": ("srt/server_args.py", "srt/arg_groups/**/*.py"),
}
"""The files of a package that name its options."""
_LOOK = """
import importlib.util, pathlib, sys
package, option, *patterns = sys.argv[1:]
spec = importlib.util.find_spec(package)
folder = pathlib.Path(spec.submodule_search_locations[0]) if spec else None
files = [file for pattern in patterns for file in folder.glob(pattern)] if folder else []
print(any(option in file.read_text() for file in files))
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


def knows_option(kind: str, python: str, env: Mapping[str, str], name: str) -> bool:
    """Whether the server of that Python has an option; names are spelt with underscores.

    Newer versions need flags that older ones refuse. False where there is no such engine, or no
    Python: starting the server says so.

    Args:
        kind: vllm or sglang.
        python: that of the servers.
        env: their environment variables beside this process's.
        name: of the option.
    """
    return _look(kind, python, env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")), name)


@cache
def _look(kind: str, python: str, path: str, name: str) -> bool:
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, kind, name, *_OPTIONS[kind]],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError:
        return False
    return done.stdout.strip() == "True"
