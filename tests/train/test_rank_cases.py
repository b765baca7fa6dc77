"""Every algorithm on two ranks against one rank. One pair of processes runs them all."""

from pathlib import Path

import peft
import pytest
import torch
from learner_parts import small_llama
from rank_cases import CASES, build, train
from rank_pair import run_on_two_ranks
from transformers import AutoModelForCausalLM

from agentrl.train.distributed import RankGroup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rank-cases")
    run_on_two_ranks("rank_cases.py", folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    results: dict[str, dict[str, torch.Tensor]] = torch.load(
        folder / "weights.pt", weights_only=True
    )
    return results


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_to_the_weights_of_one(two_ranks, name: str):
    learner = build(name, RankGroup())
    start = small_llama()
    for parameter, weight in train(learner).items():
        torch.testing.assert_close(two_ranks[name][parameter], weight, atol=2e-5, rtol=0)
    moved = two_ranks[name]["model.layers.0.mlp.up_proj.weight"] - start.get_parameter(
        "model.layers.0.mlp.up_proj.weight"
    )
    assert moved.abs().max() > 1e-4
    learner.close()


def test_the_folders_that_two_ranks_save_hold_the_whole_adapter_and_the_whole_model(
    folder: Path, two_ranks
):
    whole = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = peft.PeftModel.from_pretrained(small_llama(), folder / "adapter").merge_and_unload()
    for name, weight in two_ranks["lora"].items():
        assert torch.equal(whole.get_parameter(name), weight), name
        torch.testing.assert_close(adapted.get_parameter(name), weight, atol=1e-6, rtol=0)
