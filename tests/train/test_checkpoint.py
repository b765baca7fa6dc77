import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import SaveError
from agentrl.train.checkpoint import (
    checkpoint_path,
    checkpoint_step,
    latest_checkpoint,
    prune,
    write_atomically,
)

FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from agentrl.errors import SaveError
from agentrl.train.checkpoint import write_atomically
from agentrl.train.state import write_tensors

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with write_atomically(Path(sys.argv[1])) as folder:
        write_tensors(folder / "weights.pt", {"w": torch.ones(1_000_000)})
except SaveError as error:
    print(error)
"""


def write(target: Path, text: str) -> None:
    with write_atomically(target) as folder:
        (folder / "file").write_text(text)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_folder_has_its_name_only_when_it_is_complete(tmp_path: Path):
    target = checkpoint_path(tmp_path, 3)
    with write_atomically(target) as folder:
        (folder / "file").write_text("new")
        assert not target.exists()
        assert latest_checkpoint(tmp_path) is None
    assert (target / "file").read_text() == "new"
    assert names(tmp_path) == ["step-00000003"]


def test_a_block_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path):
    target = tmp_path / "model"
    write(target, "old")

    def interrupted() -> None:
        with write_atomically(target) as folder:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (target / "file").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_a_new_folder_replaces_the_old_one_whole(tmp_path: Path):
    target = tmp_path / "model"
    with write_atomically(target) as folder:
        (folder / "only in the old one").touch()
    write(target, "new")
    assert names(target) == ["file"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("before", [None, 2])
def test_a_full_disk_is_a_save_error_that_says_what_is_kept(tmp_path: Path, before: int | None):
    if before is not None:
        write(checkpoint_path(tmp_path, before), "kept")
    target = checkpoint_path(tmp_path, 5)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(target)], capture_output=True, text=True, check=True
    )
    assert f"{target} could not be written (File too large)" in done.stdout
    assert "--resume" in done.stdout
    if before is None:
        assert "What was saved before is untouched." in done.stdout
    else:
        assert "The checkpoint step-00000002 is kept." in done.stdout
    assert latest_checkpoint(tmp_path) == (None if before is None else tmp_path / "step-00000002")


def test_a_save_error_of_the_block_also_says_what_is_kept(tmp_path: Path):
    write(checkpoint_path(tmp_path, 2), "kept")
    message = r"^Rank 3 failed\. The checkpoint step-00000002 is kept\.$"
    with pytest.raises(SaveError, match=message), write_atomically(checkpoint_path(tmp_path, 4)):
        raise SaveError("Rank 3 failed.")
    assert names(tmp_path) == ["step-00000002"]


def test_the_latest_checkpoint_is_the_finished_one_with_the_highest_number(tmp_path: Path):
    for step in (2, 100_000_000, 10):
        write(checkpoint_path(tmp_path, step), "")
    (tmp_path / ".unfinished-step-00000900").mkdir()
    (tmp_path / "step-999999999.bak").mkdir()
    (tmp_path / "step-00000999").touch()
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert checkpoint_step(latest) == 100_000_000
    assert latest_checkpoint(tmp_path / "absent") is None


def test_a_writer_that_was_killed_between_its_renames_loses_nothing(tmp_path: Path):
    """The old folder has given its name away, the new one has not taken it yet."""
    target = tmp_path / "model"
    write(target, "old")
    target.rename(tmp_path / ".replaced-model")
    (tmp_path / ".unfinished-model").mkdir()
    with pytest.raises(ZeroDivisionError), write_atomically(target):
        raise ZeroDivisionError
    assert (target / "file").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_pruning_keeps_the_newest_and_clears_what_was_never_finished(tmp_path: Path):
    for step in (1, 20, 3):
        write(checkpoint_path(tmp_path, step), "")
    (tmp_path / ".unfinished-step-00000021").mkdir()
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000020"]


def test_a_parent_that_is_no_folder_is_a_save_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="could not be written"):
        write(tmp_path / "file" / "model", "")
