"""The example configurations are valid ones."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from agentrl.config import Config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "engines").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_valid_configuration(path: Path) -> None:
    config = Config.model_validate({"agent": "agent.py", **tomllib.loads(path.read_text())})
    assert config.engine.kind == path.stem.split("-")[0]
