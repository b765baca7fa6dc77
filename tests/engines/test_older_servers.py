"""Servers of earlier releases do not say which weights sampled a token; the engine knows itself."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from engines.conftest import server_config
from engines.tiny import source_of
from transformers import PreTrainedModel

from agentrl.engines.base import Engine
from agentrl.engines.factory import make_engine
from agentrl.engines.installed import knows_option
from agentrl.engines.pool import EnginePool
from agentrl.errors import EngineError
from agentrl.types import SamplingParams

KINDS = pytest.mark.parametrize("kind", ["fake-vllm", "fake-sglang"])
PROMPT = list(range(3, 20))
LONG = SamplingParams(200, temperature=0)


@asynccontextmanager
async def old_server(
    kind: str, model_folder: Path, run_dir: Path, pause_mode: str
) -> AsyncIterator[Engine]:
    config = server_config(kind, extra={"old": True}, pause_mode=pause_mode)
    engine = make_engine(config, run_dir=run_dir, model_folder=model_folder)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@KINDS
async def test_tokens_carry_the_version_under_which_they_were_asked_for(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with old_server(kind, model_folder, tmp_path, "abort") as engine:
        before = await engine.generate(PROMPT, SamplingParams(3))
        cut = asyncio.create_task(engine.generate(PROMPT, LONG))
        await asyncio.sleep(0.1)
        await engine.update_weights(source_of(models[1], 7))
        after = await engine.generate(PROMPT, SamplingParams(3))
    assert before.weight_versions.tolist() == [0, 0, 0]
    assert (await cut).finish_reason == "abort"
    assert set((await cut).weight_versions.tolist()) == {0}
    assert after.weight_versions.tolist() == [7, 7, 7]


@KINDS
async def test_a_request_is_not_held_over_an_update_that_nobody_could_place(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with old_server(kind, model_folder, tmp_path, "keep") as engine:
        await engine.update_weights(source_of(models[1], 1))  # nothing is in flight
        running = asyncio.create_task(engine.generate(PROMPT, LONG))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match=r"set engine\.pause_mode to wait or abort"):
            await engine.update_weights(source_of(models[0], 2))
        assert (await running).finish_reason == "length"
        again = await engine.generate(PROMPT, SamplingParams(3))
    assert again.weight_versions.tolist() == [1, 1, 1]


@KINDS
async def test_a_server_that_knows_no_versions_is_told_one_only_once(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with old_server(kind, model_folder, tmp_path, "wait") as pool:
        assert isinstance(pool, EnginePool)
        for version in (1, 2):
            await pool.update_weights(source_of(models[1], version))
        (engine,) = pool.engines
        assert engine.server is not None
        async with httpx.AsyncClient() as client:
            asked = (await client.get(f"{engine.server.url}/fake/requests")).json()
        assert asked.count("/update_weight_version") == 1


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("vllm", "entrypoints/openai/cli_args.py"),
        ("sglang", "srt/server_args.py"),
        ("sglang", "srt/arg_groups/fields/serving.py"),
    ],
)
def test_options_are_read_out_of_the_engine_s_own_files(
    kind: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / kind / file).parent.mkdir(parents=True)
    (tmp_path / kind / "__init__.py").write_text("raise SystemExit('it was imported')")
    (tmp_path / kind / file).write_text("class Arguments:\n    enable_scale_out: bool = False\n")
    env = {"PYTHONPATH": str(tmp_path)}
    assert knows_option(kind, sys.executable, env, "enable_scale_out")
    assert not knows_option(kind, sys.executable, env, "enable_time_travel")
    assert not knows_option(kind, str(tmp_path / "no-python"), env, "enable_scale_out")
