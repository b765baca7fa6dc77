"""Two ranks that share out the layers of a model, against one rank that has them whole."""

from pathlib import Path

import pytest
import torch
from learner_parts import VOCAB, make_config, small_llama
from rank_pair import run_on_two_ranks
from tensor_ranks import ALGORITHMS, build, train
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.errors import UsageError
from agentrl.train.distributed import RankGroup
from agentrl.train.learner import Learner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor-ranks")
    run_on_two_ranks("tensor_ranks.py", folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict:
    return torch.load(folder / "weights.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_they_train_to_the_weights_of_one(two_ranks: dict, name: str):
    learner = build(name, RankGroup(), shards=1)
    for parameter, weight in train(learner, 2).items():
        torch.testing.assert_close(two_ranks[name]["weights"][parameter], weight, atol=2e-5, rtol=0)
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_they_resume_bit_for_bit_and_save_the_whole_model(two_ranks: dict, folder: Path, name: str):
    result = two_ranks[name]
    saved = AutoModelForCausalLM.from_pretrained(folder / name / "model")
    for parameter, weight in result["weights"].items():
        assert torch.equal(weight, result["again"][parameter]), parameter
        assert torch.equal(weight, saved.get_parameter(parameter)), parameter


@pytest.mark.slow
def test_a_checkpoint_of_shards_is_refused_by_a_run_without_them(two_ranks: dict, folder: Path):
    learner = build("kl", RankGroup(), shards=1)
    with pytest.raises(UsageError, match=r"saved with train\.tensor_parallel_size 2"):
        learner.load(folder / "kl")
    learner.close()


def test_numbers_that_do_not_divide_are_refused():
    config = make_config(train={"tensor_parallel_size": 2})
    with pytest.raises(UsageError, match=r"tensor_parallel_size 2 does not divide.*ranks \(1\)"):
        Learner(small_llama(), config)


def test_a_mixture_of_experts_is_refused():
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(UsageError, match="does not share out experts, and the model has 4"):
        Learner(Qwen3MoeForCausalLM(config), make_config(train={"tensor_parallel_size": 2}))


@pytest.mark.parametrize(
    ("sections", "other"),
    [
        ({"model": {"lora": {"rank": 2}}}, "model.lora"),
        ({"train": {"sequence_parallel_size": 2}}, "train.sequence_parallel_size"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(sections: dict, other: str):
    train = {"tensor_parallel_size": 2} | sections.pop("train", {})
    with pytest.raises(ValueError, match=f"does not go with {other}"):
        make_config(train=train, **sections)
