"""Run under torchrun: five steps on two ranks, written to the folder given as argument.

In the folder `one-rank` is the state of one rank after three steps, on which two ranks go on.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from learner_parts import VOCAB, make_config, random_sample, small_llama, weighted
from transformers import LlamaForCausalLM

from agentrl.errors import SaveError
from agentrl.train import microbatch, zero
from agentrl.train.batch import Sample
from agentrl.train.learner import Learner

LENGTHS = ((40, 25), (5, 1), (6, 2))
"""The longest goes to one rank alone: 25 tokens against 3."""


def unequal_samples() -> list[Sample]:
    generator = np.random.default_rng(7)
    return weighted([random_sample(generator, length=n, sampled=k) for n, k in LENGTHS])


def two_rank_config():
    return make_config(
        train={"lr": 1e-2, "max_tokens_per_gpu": 40, "gradient_checkpointing": True},
        rollout={"max_tokens": 40, "max_new_tokens": 40},
        algo={"kl": {"coef": 0.1}},
    )


def train_steps(learner: Learner, samples: list[Sample], count: int = 5) -> list[float]:
    norms = []
    for _ in range(count):
        learner.forward_backward(samples, learner.config.algo)
        norms.append(learner.step().grad_norm)
    return norms


def build() -> Learner:
    return Learner(small_llama(), two_rank_config(), reference=small_llama())


def drive(learner: Learner, folder: Path) -> None:
    samples = unequal_samples()
    first = learner.logprobs(samples)
    reference = learner.reference_logprobs(samples)
    samples = [s.with_fields(reference_logprobs=r) for s, r in zip(samples, reference, strict=True)]
    (folder / "state").mkdir()
    learner.save(folder / "state")
    norms = train_steps(learner, samples)
    weights = {name: weight.clone() for name, weight in learner.named_weights()}
    learner.save_pretrained(folder / "model")
    failed = None
    try:
        learner.save(folder / "absent")
    except SaveError as error:
        failed = str(error)
    learner.load(folder / "state")
    again = train_steps(learner, samples, 3)
    (folder / "two-ranks").mkdir()
    learner.save(folder / "two-ranks")
    again += train_steps(learner, samples, 2)
    repeated = {name: weight.clone() for name, weight in learner.named_weights()}
    learner.load(folder / "one-rank")
    train_steps(learner, samples, 2)
    taken_over = {name: weight.clone() for name, weight in learner.named_weights()}
    torch.save(
        {
            "first": [torch.from_numpy(x) for x in first],
            "reference": [torch.from_numpy(x) for x in reference],
            "norms": norms,
            "norms_again": again,
            "weights": weights,
            "weights_again": repeated,
            "weights_from_one": taken_over,
            "steps_from_one": learner.optimizer_steps,
            "save_error": failed,
            "live": learner.weight_source(1).live,
        },
        folder / "result.pt",
    )


def main() -> None:
    # Small enough that the weights leave in many buckets and the head works in several chunks.
    zero.BUCKET_NUMEL = 500
    microbatch.LOGITS_PER_CHUNK = 4 * VOCAB
    folder = Path(sys.argv[1])
    learner = build()
    if learner.group.rank != 0:
        learner.follow()
        return
    try:
        drive(learner, folder)
    finally:
        learner.close()
    LlamaForCausalLM.from_pretrained(folder / "model")


if __name__ == "__main__":
    main()
