"""The loader inside a real SGLang makes its sleep wait for kernels."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from engines.conftest import python_of

from agentrl.engines.sglang import PACKAGE, install_loader

pytestmark = pytest.mark.engine

PAUSE = f"""
import torch
from types import SimpleNamespace
from sglang.srt.utils import torch_memory_saver_adapter as adapters
import {PACKAGE}

torch.accelerator.synchronize = lambda: print("synchronized")
adapters._memory_saver = SimpleNamespace(pause=lambda tag: print("paused", tag))
adapters._TorchMemorySaverAdapterReal().pause("kv_cache")
"""


def test_memory_is_taken_away_only_when_kernels_have_ended(tmp_path: Path) -> None:
    done = subprocess.run(
        [python_of("sglang"), "-c", PAUSE],
        env=os.environ | {"PYTHONPATH": str(install_loader(tmp_path / "loader"))},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.endswith("synchronized\npaused kv_cache\n")
