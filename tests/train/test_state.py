import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_parts import make_config, small_llama

from agentrl.errors import SaveError, UsageError
from agentrl.train.learner import Learner

SCRIPT = Path(__file__).with_name("resume_run.py")


def run(folder: Path, mode: str) -> str:
    """What the process printed; nothing but its own one line, on either stream."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    return done.stdout


def learner(**model) -> Learner:
    return Learner(small_llama(**model), make_config())


def test_a_run_resumed_in_a_new_process_gives_the_same_bits_and_neither_chatters(tmp_path: Path):
    """Weights, gradient norms, random numbers and the count of optimizer steps."""
    whole = run(tmp_path, "whole")
    assert whole.split()[-1] == "5"
    assert run(tmp_path, "resumed") == whole


def test_a_checkpoint_that_is_not_there_or_broken_is_a_usage_error(tmp_path: Path):
    subject = learner()
    with pytest.raises(UsageError, match="cannot be read: resume from another checkpoint"):
        subject.load(tmp_path)
    subject.save(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UsageError, match="cannot be read: resume from another checkpoint"):
        subject.load(tmp_path)
    file.write_bytes(b"garbage")
    with pytest.raises(UsageError, match="cannot be read: resume from another checkpoint"):
        subject.load(tmp_path)
    subject.close()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    saved = learner(tied=True)
    saved.save(tmp_path)
    other = learner(tied=False)
    with pytest.raises(
        UsageError, match=r"other shapes: resume with the --model\.path, --model\.lora"
    ):
        other.load(tmp_path)
    saved.close()
    other.close()


def test_a_folder_that_cannot_be_written_is_a_save_error(tmp_path: Path):
    subject = learner()
    with pytest.raises(SaveError, match="could not write"):
        subject.save(tmp_path / "absent")
    subject.close()


def test_the_weights_are_whole_right_after_loading(tmp_path: Path):
    """An engine in the same process reads them in place before any step."""
    saved, other = learner(seed=1), learner(seed=2)
    saved.save(tmp_path)
    other.load(tmp_path)
    for (name, weight), (_, loaded) in zip(
        saved.named_weights(), other.named_weights(), strict=True
    ):
        assert torch.equal(weight, loaded), name
    saved.close()
    other.close()
