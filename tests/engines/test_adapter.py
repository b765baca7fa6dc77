"""A LoRA adapter that travels alone: the server samples as a model with it merged in would."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import psutil
import pytest
import torch
from engines.conftest import python_of, server_config
from engines.tiny import greedy, logprobs_R, source_of
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, PreTrainedModel

from agentrl.config import Config
from agentrl.engines.base import WeightSource
from agentrl.engines.factory import make_engine
from agentrl.engines.launch import vllm_launch
from agentrl.engines.pool import EnginePool
from agentrl.errors import EngineError
from agentrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from agentrl.train.batch import Sample
from agentrl.train.learner import Learner
from agentrl.types import SamplingParams

AGENT = Path(__file__).parents[2] / "examples" / "agents" / "number_guess.py"
PROMPT = list(range(3, 60))
GREEDY = SamplingParams(8, temperature=0)
LONG = SamplingParams(400, temperature=2.0)
KINDS = ["fake-vllm", pytest.param("vllm", marks=pytest.mark.engine)]


def adapted(base: PreTrainedModel, seed: int, version: int) -> tuple[PreTrainedModel, WeightSource]:
    """A model with a random adapter of rank 4 merged in, and that adapter as a learner gives it."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False
    )
    torch.manual_seed(seed)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    merged = copy.deepcopy(model).merge_and_unload()

    def no_weights() -> Any:
        pytest.fail("an adapter travels alone, but whole weights were drawn")

    return merged, WeightSource(
        no_weights, version, save_adapter=lambda folder: model.save_pretrained(str(folder))
    )


@asynccontextmanager
async def serving(
    kind: str, folder: Path, run_dir: Path, **engine: Any
) -> AsyncIterator[EnginePool]:
    section = server_config(kind, transport="auto", bucket_mb=512, **engine).engine
    config = Config(
        agent="agent.py",  # type: ignore[arg-type]
        model={"lora": {"rank": 4, "alpha": 8}},  # type: ignore[arg-type]
        engine=section,
    )
    pool = make_engine(config, run_dir=run_dir, model_folder=folder)
    assert isinstance(pool, EnginePool)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_each_version_of_an_adapter_is_sampled_from_and_nothing_older(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with serving(kind, model_folder, tmp_path) as pool:
        before = await pool.generate(PROMPT, GREEDY)
        assert before.token_ids.tolist() == greedy(models[0], PROMPT, 8)
        for version in (1, 2, 3):
            merged, source = adapted(models[0], seed=version, version=version)
            await pool.update_weights(source)
            result = await pool.generate(PROMPT, GREEDY)
            ids = result.token_ids.tolist()
            assert ids == greedy(merged, PROMPT, 8)
            assert set(result.weight_versions.tolist()) == {version}
            assert result.cached_tokens == 0  # what was cached is of other weights
            assert result.logprobs is not None
            expected = logprobs_R(merged, PROMPT, ids)
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["adapter-3"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_in_flight_ends_with_its_tokens_when_an_adapter_comes(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with serving(kind, model_folder, tmp_path) as pool:
        request = asyncio.create_task(pool.generate(PROMPT, LONG))
        await asyncio.sleep(0.2)
        merged, source = adapted(models[0], seed=1, version=1)
        await pool.update_weights(source)
        part = await request
        assert part.finish_reason == "abort"
        assert set(part.weight_versions.tolist()) <= {0}
        context = [*PROMPT, *part.token_ids.tolist()]
        rest = await pool.generate(context, GREEDY)
        assert rest.token_ids.tolist() == greedy(merged, context, 8)


async def test_a_broken_adapter_is_an_error_and_the_next_one_works(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with serving("fake-vllm", model_folder, tmp_path) as pool:
        broken = WeightSource(lambda: iter(()), 1, save_adapter=lambda _: None)
        with pytest.raises(EngineError, match="load_lora_adapter"):
            await pool.update_weights(broken)
        with pytest.raises(EngineError, match="takes requests"):
            await pool.generate(PROMPT, GREEDY)
        merged, source = adapted(models[0], seed=2, version=1)
        await pool.update_weights(source)
        result = await pool.generate(PROMPT, GREEDY)
        assert result.token_ids.tolist() == greedy(merged, PROMPT, 8)


async def test_a_learners_adapter_gives_what_its_merged_weights_say(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    config = Config(
        agent="a.py",  # type: ignore[arg-type]
        model={"lora": {"rank": 4, "alpha": 8}},  # type: ignore[arg-type]
        train={"lr": 0.1},  # type: ignore[arg-type]
    )
    learner = Learner(copy.deepcopy(models[0]), config)
    sample = Sample(np.array(PROMPT, np.int32), np.arange(20, len(PROMPT), dtype=np.int32))
    ones = np.ones(sample.num_sampled)
    learner.forward_backward([sample.with_fields(advantages=ones, weights=ones)], config.algo)
    learner.step()
    merged = copy.deepcopy(models[0])
    merged.load_state_dict(dict(learner.named_weights()))
    async with serving("fake-vllm", model_folder, tmp_path) as pool:
        await pool.update_weights(learner.weight_source(1))
        result = await pool.generate(PROMPT, GREEDY)
    learner.close()
    assert greedy(merged, PROMPT, 8) != greedy(models[0], PROMPT, 8)
    assert result.token_ids.tolist() == greedy(merged, PROMPT, 8)


async def test_a_server_that_dies_gets_the_newest_adapter_again(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with serving("fake-vllm", model_folder, tmp_path) as pool:
        merged, source = adapted(models[0], seed=1, version=4)
        await pool.update_weights(source)
        server = pool.engines[0].server
        assert server is not None
        psutil.Process(server.pid).children()[0].kill()
        await asyncio.wait_for(server.died.wait(), 30)
        result = await asyncio.wait_for(pool.generate(PROMPT, GREEDY), 120)
        assert result.token_ids.tolist() == greedy(merged, PROMPT, 8)
        assert set(result.weight_versions.tolist()) == {4}


async def test_weights_without_an_adapter_are_refused(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with serving("fake-vllm", model_folder, tmp_path) as pool:
        with pytest.raises(EngineError, match=r"set engine\.lora merged"):
            await pool.update_weights(source_of(models[1], 1))


def save_policy(folder: Path) -> None:
    """A model that speaks ChatML, with heads that vLLM computes on a CPU."""
    tokenizer = build_tiny_tokenizer()
    tiny = build_tiny_model(tokenizer, seed=0)
    config = copy.deepcopy(tiny.config)
    config.num_attention_heads = config.num_key_value_heads = 2
    config.head_dim = 32
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config = tiny.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_lora_run_and_its_resumption_sample_from_the_adapter_that_is_trained(
    tmp_path: Path,
) -> None:
    save_policy(tmp_path / "policy")
    run_dir = tmp_path / "run"

    def train(*flags: str) -> None:
        command = [sys.executable, "-m", "agentrl", "train", *flags]
        subprocess.run(command, check=True, timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1"})

    train(
        *("--agent", str(AGENT), "--log.run_dir", str(run_dir)),
        *("--model.path", str(tmp_path / "policy"), "--model.lora.rank", "8"),
        *("--engine.kind", "vllm", "--engine.python", python_of("vllm")),
        *("--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "4"),
        *("--rollout.max_new_tokens", "3", "--rollout.max_turns", "3"),
        *("--rollout.max_tokens", "128", "--rollout.logprobs", "sampler"),
        *("--algo.advantage.drop_zero_variance", "false", "--train.lr", "1e-2"),
        *("--train.max_steps", "3", "--train.save_steps", "3"),
    )
    train("--resume", str(run_dir), "--train.max_steps", "4")
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    # The engine's log-probabilities are the learner's at every step, and the policy has moved.
    assert max(step["mismatch/log_ratio_max"] for step in steps) < 1e-3
    assert len({step["policy/entropy"] for step in steps}) == 4
    adapter = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert max(float(t.abs().max()) for name, t in adapter.items() if "lora_B" in name) > 1e-3


@pytest.mark.parametrize(("rank", "room"), [(1, "8"), (8, "8"), (9, "16"), (200, "256")])
def test_vllm_makes_room_for_the_rank(rank: int, room: str, tmp_path: Path) -> None:
    config = server_config("fake-vllm").engine
    launch = vllm_launch(
        config, "m", dtype="float32", max_model_len=64, plugin=tmp_path, lora_rank=rank
    )
    line = launch.with_port(1)
    assert "--enable-lora" in line
    assert line[line.index("--max-lora-rank") + 1] == room
    assert launch.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.parametrize(
    ("engine", "rank", "words"),
    [
        ({"kind": "vllm", "lora": "merged"}, 0, "engine.lora would be ignored"),
        ({"kind": "sglang", "lora": "adapter"}, 4, "works with vllm only, not with sglang"),
        ({"lora": "adapter"}, 4, "works with vllm only, not with transformers"),
        ({"kind": "vllm", "transport": "gloo"}, 4, "engine.transport gloo does not go"),
        ({"kind": "vllm", "pause_mode": "keep"}, 4, "engine.pause_mode keep does not go"),
        ({"kind": "vllm", "data_parallel_size": 2}, 4, "engine.data_parallel_size 2 does not go"),
        ({"kind": "vllm"}, 1000, "is more than vLLM takes"),
        ({"kind": "vllm", "extra": {"enable_lora": True}}, 4, "use engine.lora"),
    ],
)
def test_what_an_adapter_cannot_go_with_is_refused(
    engine: dict[str, Any], rank: int, words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        Config(agent="a.py", engine=engine, model={"lora": {"rank": rank}})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "alone"),
    [
        ({"kind": "vllm"}, True),
        ({"kind": "vllm", "lora": "merged", "transport": "gloo"}, False),
        ({"kind": "sglang"}, False),
        ({}, False),
    ],
)
def test_the_adapter_travels_alone_where_the_engine_takes_it(
    engine: dict[str, Any], alone: bool
) -> None:
    config = Config(agent="a.py", engine=engine, model={"lora": {"rank": 4}})  # type: ignore[arg-type]
    assert config.sends_adapter == alone
