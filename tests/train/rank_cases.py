"""Every algorithm on as many ranks as torchrun started; results go to the folder given.

`CASES` are the settings of each; `train` is what one or several ranks do with them.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from learner_parts import make_config, small_llama, trajectory

from agentrl.config import Config
from agentrl.train.distributed import RankGroup
from agentrl.train.learner import Learner
from agentrl.train.update import policy_update
from agentrl.types import StopReason, Trajectory

GAE = {"advantage": {"estimator": "gae"}}
SHARED = {"sequence_parallel_size": 2}
LORA = {"lora": {"rank": 2, "alpha": 3.0}}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algo": {}},
    **{
        name: {"algo": {"advantage": {"estimator": name}}}
        for name in (
            *("dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
            *("turn_level", "gae"),
        )
    },
    **{name: {"algo": {"loss": {"kind": name}}} for name in ("gspo", "cispo", "sapo", "reinforce")},
    "dual clip": {"algo": {"loss": {"clip_ratio_c": 3.0}}},
    **{
        name: {"algo": {"loss": {"aggregation": name}}}
        for name in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    },
    **{
        name: {"algo": {"correction": {"kind": name}}}
        for name in ("tis", "icepop", "mask", "seq_tis", "seq_mask")
    },
    "k1": {"algo": {"kl": {"coef": 0.1, "estimator": "k1"}}},
    "k2": {"algo": {"kl": {"coef": 0.1, "estimator": "k2"}}},
    "k3": {"algo": {"kl": {"coef": 0.1, "estimator": "k3"}}},
    "kl in reward": {"algo": GAE | {"kl": {"coef": 0.1, "estimator": "k1", "in_reward": True}}},
    "entropy": {"algo": {"entropy_coef": 0.05}},
    "sampler's log-probabilities": {"algo": {"loss": {"old_logprobs": "sampler"}}},
    "overlong episodes left out": {"algo": {"loss": {"mask_truncated": True}}},
    "lora": {"algo": {"kl": {"coef": 0.1}}, "model": LORA},
    "lora with values": {"algo": GAE, "model": LORA},
    "value model": {"algo": GAE | {"value": {"model": "separate", "lr": 3e-3}}},
    "ulysses": {"train": SHARED, "algo": {"kl": {"coef": 0.1}}},
    "ulysses with a value model": {
        "train": SHARED | {"gradient_checkpointing": True},
        "algo": GAE | {"value": {"model": "separate"}},
    },
    "ulysses with sequence ratios and values": {
        "train": SHARED,
        "algo": GAE | {"loss": {"kind": "gspo"}, "entropy_coef": 0.01},
        "model": LORA,
    },
    "ulysses through the cache of a prefix": {"train": SHARED | {"max_tokens_per_gpu": 5}},
    "optimizer on the host": {"train": {"offload": "optimizer"}},
    "all on the host": {
        "train": {"offload": "all", "reference_offload": True},
        "algo": {"kl": {"coef": 0.1}},
    },
    "lora on the host": {"train": {"offload": "all"}, "model": LORA},
}


def case_config(name: str, ranks: int) -> Config:
    """Two passes of two optimizer steps each, so that ratios leave 1."""
    case = CASES[name]
    if ranks == 1 and "sequence_parallel_size" in case.get("train", {}):
        case = case | {"train": {**case["train"], "sequence_parallel_size": 1}}
    train = {"lr": 1e-3, "max_tokens_per_gpu": 64, "ppo_epochs": 2, "mini_batches": 2}
    rollout = {"batch_size": 2, "n_samples_per_prompt": 4, "max_tokens": 64, "max_new_tokens": 64}
    return make_config(
        rollout=rollout,
        train=train | case.get("train", {}),
        **{key: value for key, value in case.items() if key != "train"},
    )


def batch() -> list[Trajectory]:
    """Two groups of four episodes of one to three turns; one was cut, one failed."""
    turns = ((2, 3), (4,), (1, 2, 5), (3, 3), (7,), (2, 2), (1, 1), (6, 1))
    rewards = (1.0, 0.0, 0.5, None, 0.0, 1.0, 0.25, 1.0)
    return [
        trajectory(
            reward,
            group="a" if index < 4 else "b",
            turns=lengths,
            stop=StopReason.MAX_TOKENS if index == 4 else StopReason.DONE,
            seed=index,
        )
        for index, (lengths, reward) in enumerate(zip(turns, rewards, strict=True))
    ]


def build(name: str, group: RankGroup) -> Learner:
    config = case_config(name, group.world_size)
    reference = None
    if config.algo.kl.coef > 0 and not config.model.lora.rank:
        reference = small_llama()
    value_model = small_llama() if config.algo.value.model == "separate" else None
    return Learner(small_llama(), config, group=group, reference=reference, value_model=value_model)


def train(learner: Learner) -> dict[str, torch.Tensor]:
    """Two updates on the batch; the weights after them, by name."""
    for _ in range(2):
        policy_update(learner, batch(), learner.config)
    return {name: weight.clone() for name, weight in learner.named_weights()}


def main() -> None:
    folder, group = Path(sys.argv[1]), RankGroup()
    results = {}
    for name in CASES:
        learner = build(name, group)
        if group.rank != 0:
            learner.follow()
            continue
        results[name] = train(learner)
        if name == "lora":
            learner.save_adapter(folder / "adapter")
            learner.save_pretrained(folder / "model")
        learner.close()
    if group.rank == 0:
        torch.save(results, folder / "weights.pt")


if __name__ == "__main__":
    main()
