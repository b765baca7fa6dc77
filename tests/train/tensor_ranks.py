"""Layers shared out among as many ranks as torchrun started; results go to the folder given."""

import sys
from pathlib import Path

import torch
from learner_parts import VOCAB, make_config
from rank_cases import GAE, batch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.train import zero
from agentrl.train.distributed import RankGroup
from agentrl.train.learner import Learner
from agentrl.train.update import policy_update

ALGORITHMS = {
    "kl": {"kl": {"coef": 0.1}, "loss": {"kind": "gspo"}},
    "values": GAE,
    "value model": GAE | {"value": {"model": "separate", "lr": 3e-3}},
}


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def build(name: str, group: RankGroup, shards: int) -> Learner:
    config = make_config(
        algo=ALGORITHMS[name],
        train={"lr": 1e-3, "max_tokens_per_gpu": 64, "ppo_epochs": 2, "mini_batches": 2,
               "tensor_parallel_size": shards},
        rollout={"batch_size": 2, "n_samples_per_prompt": 4, "max_tokens": 64,
                 "max_new_tokens": 64},
    )  # fmt: skip
    return Learner(
        model(),
        config,
        group=group,
        reference=model() if config.algo.kl.coef > 0 else None,
        value_model=model() if config.algo.value.model == "separate" else None,
    )


def train(learner: Learner, updates: int) -> dict[str, torch.Tensor]:
    for _ in range(updates):
        policy_update(learner, batch(), learner.config)
    return {name: weight.clone() for name, weight in learner.named_weights()}


def drive(learner: Learner, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    train(learner, 1)
    learner.save(folder)
    weights = train(learner, 1)
    learner.save_pretrained(folder / "model")
    learner.load(folder)
    return {"weights": weights, "again": train(learner, 1)}


def main() -> None:
    zero.BUCKET_NUMEL = 500
    folder, group = Path(sys.argv[1]), RankGroup()
    results = {}
    for name in ALGORITHMS:
        learner = build(name, group, shards=2)
        if group.rank != 0:
            learner.follow()
            continue
        (folder / name).mkdir()
        results[name] = drive(learner, folder / name)
        learner.close()
    if group.rank == 0:
        torch.save(results, folder / "weights.pt")


if __name__ == "__main__":
    main()
