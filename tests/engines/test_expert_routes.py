"""Servers tell which experts the tokens of a request went to."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from engines.conftest import server_config
from engines.tiny import VOCAB_SIZE, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from agentrl.config import Config
from agentrl.engines.expert_routes import read_npy, read_plain
from agentrl.engines.factory import make_engine
from agentrl.errors import EngineError, UsageError
from agentrl.models.routing import Routers
from agentrl.types import SamplingParams

KINDS = pytest.mark.parametrize("kind", ["fake-vllm", "fake-sglang"])
PROMPT = list(range(3, 20))


def mixture() -> PreTrainedModel:
    """The second of its three layers has no experts."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            mlp_only_layers=[1],
            initializer_range=0.3,
            eos_token_id=1,
            bos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def replaying(kind: str) -> Config:
    config = server_config(kind)
    rollout = config.rollout.model_copy(update={"router_replay": True})
    return config.model_copy(update={"rollout": rollout})


@KINDS
async def test_an_answer_holds_the_experts_of_every_token_but_the_last(kind: str, tmp_path: Path):
    model = mixture()
    folder = save_model(model, tmp_path / "model")
    engine = make_engine(replaying(kind), run_dir=tmp_path, model_folder=folder)
    try:
        await engine.start()
        out = await engine.generate(PROMPT, SamplingParams(5, seed=1))
    finally:
        await engine.close()
    routers = Routers(model)
    model(torch.tensor([[*PROMPT, *out.token_ids.tolist()[:-1]]]))
    told = out.routed_experts
    assert told.shape == (len(PROMPT) + 4, 3, 2)
    assert told[:, [0, 2]].tolist() == routers.taken()[:, [0, 2]].tolist()


@KINDS
async def test_a_model_without_experts_is_refused(kind: str, model_folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="a model of type llama has no experts: remove it"):
        make_engine(replaying(kind), run_dir=tmp_path, model_folder=model_folder)


def test_what_is_no_list_of_experts_is_an_error():
    assert read_plain(base64.b64encode(np.arange(8, dtype=np.int32)).decode(), 2, 2).tolist() == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]
    for text in ("AAAA", "-"):
        with pytest.raises(EngineError, match="experts of a request cannot be read"):
            read_plain(text, 2, 2)
        with pytest.raises(EngineError, match="experts of a request cannot be read"):
            read_npy(text)
