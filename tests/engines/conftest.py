"""Engines of every kind that the contract suite runs against.

`vllm` and `sglang` are real servers out of environments that `scripts/engine_env.py` makes;
`fake-vllm` and `fake-sglang` are processes that answer like them, started by the same command
lines. Each server is started once and serves all tests of the session.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engines.tiny import MAX_MODEL_LEN, build_model, save_model, source_of
from transformers import PreTrainedModel

from agentrl.config import Config
from agentrl.engines.base import Engine
from agentrl.engines.factory import make_engine

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "scripts" / "engine_env.py"

REAL_KINDS = ("vllm", "sglang")
REAL = [pytest.param(kind, marks=pytest.mark.engine) for kind in REAL_KINDS]
SERVERS = ["fake-vllm", "fake-sglang", *REAL]
ALL = ["transformers", *SERVERS]
ORDER = ["transformers", "fake-vllm", "fake-sglang", "vllm", "sglang"]


def python_of(kind: str) -> str:
    """Python of the environment with a real engine, which is made at the first call."""
    command = [sys.executable, str(SCRIPT), kind]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def server_config(kind: str, **engine: Any) -> Config:
    """The configuration of one kind of server; keyword arguments override the section `engine`."""
    name = kind.removeprefix("fake-")
    if kind.startswith("fake-"):
        section: dict[str, Any] = {"extra": {"token_seconds": 0.005}}
        section["env"] = {"PYTHONPATH": str(HERE / "fake")}
    else:
        section = {"python": python_of(kind), "extra": {}, "env": {}}
    section["env"] |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    section |= {"kind": name, "max_model_len": MAX_MODEL_LEN, "transport": "gloo", "bucket_mb": 1}
    section["extra"] |= engine.pop("extra", {})
    return Config(agent="agent.py", engine=section | engine)  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests of one kind of engine together, so that each server starts once."""

    def place(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        kind = callspec.params.get("served") if callspec is not None else None
        return ORDER.index(kind) if kind in ORDER else -1

    items.sort(key=place)


@dataclass
class EngineUnderTest:
    """An engine, the two models whose weights it may hold, and which of them it holds."""

    kind: str
    engine: Engine
    models: list[PreTrainedModel]
    held: int = 0
    versions: Any = field(default_factory=lambda: itertools.count(1))

    @property
    def model(self) -> PreTrainedModel:
        """The model whose weights the engine holds."""
        return self.models[self.held]

    async def load(self, index: int) -> int:
        """Bring the weights of one of the models into the engine; returns their version."""
        version = next(self.versions)
        await self.engine.update_weights(source_of(self.models[index], version))
        self.held = index
        return version


@pytest.fixture(scope="session")
def models() -> list[PreTrainedModel]:
    return [build_model(0), build_model(1)]


@pytest.fixture(scope="session")
def model_folder(models: list[PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(models[0], tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started(
    models: list[PreTrainedModel], model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Callable[[str], Any]]:
    """Gives the session's engine of a kind, started at its first use; one real server at a time."""
    engines: dict[str, EngineUnderTest] = {}

    async def get(kind: str) -> EngineUnderTest:
        if kind not in engines:
            for other in [name for name in engines if name in REAL_KINDS]:
                await engines.pop(other).engine.close()
            if kind == "transformers":
                config = Config(
                    agent="agent.py",  # type: ignore[arg-type]
                    engine={"max_model_len": MAX_MODEL_LEN},  # type: ignore[arg-type]
                )
            else:
                config = server_config(kind)
            engine = make_engine(
                config,
                run_dir=tmp_path_factory.mktemp(kind),
                model_folder=model_folder,
                module=copy.deepcopy(models[0]),
            )
            await engine.start()
            engines[kind] = EngineUnderTest(kind, engine, models)
        return engines[kind]

    yield get
    for entry in engines.values():
        await entry.engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def served(request: pytest.FixtureRequest, started: Any) -> EngineUnderTest:
    """The engine of the kind that the test is parametrized with, holding the first model."""
    entry: EngineUnderTest = await started(request.param)
    if entry.held != 0:
        await entry.load(0)
    return entry
