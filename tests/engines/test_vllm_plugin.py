"""The plugin inside a real vLLM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from engines.conftest import python_of

from agentrl.engines.vllm import install_plugin

pytestmark = pytest.mark.engine

WAIT = """
import zmq
import agentrl_vllm_plugin
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

agentrl_vllm_plugin.register()
address = "ipc://" + PATH
reader = SpinCondition(is_reader=True, context=zmq.Context(), notify_address=address)
reader.wait(timeout_ms=None)
print("looked again")
"""


def test_a_process_that_was_not_called_looks_for_its_message_all_the_same(tmp_path: Path) -> None:
    # Nobody ever calls: vLLM loses calls, and on a CPU nothing else wakes a process that sleeps.
    program = WAIT.replace("PATH", repr(str(tmp_path / "calls")))
    done = subprocess.run(
        [python_of("vllm"), "-c", program],
        env=os.environ | {"PYTHONPATH": str(install_plugin(tmp_path / "plugin"))},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.endswith("looked again\n")
