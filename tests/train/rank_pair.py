"""Starts a script of this folder on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_on_two_ranks"]


def run_on_two_ranks(script: str, *arguments: object) -> None:
    """Run `script` under torchrun to its end; what it complained of is in the failure."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        str(Path(__file__).with_name(script)),
        *map(str, arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
