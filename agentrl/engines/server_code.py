"""Puts our code that runs inside servers where they import it: they may lack agentrl."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["install_code"]

HERE = Path(__file__).parent
IN_PLACE = ("copy_plan.py", "copy_proof.py", "copy_tiling.py", "in_place.py")
"""What the code of every engine imports from beside it."""


def install_code(folder: Path, package: str, main: str, *others: str) -> Path:
    """Make a package of `main`, and of files beside it, in `folder`, which is returned.

    It is for PYTHONPATH.
    """
    home = folder / package
    home.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(HERE / main, home / "__init__.py")
    for name in (*IN_PLACE, *others):
        shutil.copyfile(HERE / name, home / name)
    return folder
