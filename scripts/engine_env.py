"""Make the virtual environment of a rollout engine (or a router), and print its Python's path.

    python scripts/engine_env.py vllm
    python scripts/engine_env.py sglang
    python scripts/engine_env.py router

The environment lies outside the checkout, in `$XDG_CACHE_HOME/agentrl/engines/<kind>-<hash>`, where
the hash is that of the pinned requirements and of what `tests/engines/cpu` adds to them: a change
makes a new environment, and everything else finds the old one. A mark is set when the installation
has ended, so that an interrupted one is never taken for a whole one. Only the standard library is
needed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

KINDS = ("vllm", "sglang", "router")
COMPLETE = "installation-complete"
ENGINE_TESTS = Path(__file__).resolve().parents[1] / "tests" / "engines"


def requirements_file(kind: str) -> Path:
    """The pins of one kind of engine."""
    return ENGINE_TESTS / f"requirements-{kind}.txt"


def overlay_folder(kind: str) -> Path:
    """What goes into site-packages beside the pinned packages, so that they run on a CPU."""
    return ENGINE_TESTS / "cpu" / kind


def cache_root() -> Path:
    """Where the environments lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "agentrl" / "engines"


def environment_path(kind: str) -> Path:
    """The folder of one environment; the pins and the Python version are in its name."""
    digest = hashlib.sha256(f"{sys.version_info.major}.{sys.version_info.minor}".encode())
    digest.update(requirements_file(kind).read_bytes())
    for path in sorted(overlay_folder(kind).rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(str(path.relative_to(ENGINE_TESTS)).encode() + path.read_bytes())
    return cache_root() / f"{kind}-{digest.hexdigest()[:12]}"


def ensure_environment(kind: str) -> Path:
    """Make the environment unless it exists, and return the path of its Python.

    Two callers at once build it once: the second waits for the first.

    Raises:
        subprocess.CalledProcessError: pip failed; what it said is on standard error.
    """
    target = environment_path(kind)
    python = target / "bin" / "python"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / COMPLETE).exists():
            _build(kind, target)
    return python


def _build(kind: str, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True, stdout=sys.stderr)
    command = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["-r", str(requirements_file(kind))]
    subprocess.run(command, check=True, stdout=sys.stderr)
    packages = next((target / "lib").glob("python*/site-packages"))
    if overlay_folder(kind).exists():
        shutil.copytree(overlay_folder(kind), packages, dirs_exist_ok=True)
    (target / COMPLETE).touch()


def main() -> None:
    """Parse the command line, make the environment, print its Python."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--path", action="store_true", help="print the path without making it")
    arguments = parser.parse_args()
    if arguments.path:
        print(environment_path(arguments.kind) / "bin" / "python")
    else:
        print(ensure_environment(arguments.kind))


if __name__ == "__main__":
    main()
