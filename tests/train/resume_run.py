"""Run as its own process: trains, and prints what came of it as bits.

Arguments: a folder; `whole` (three steps, save, two more) or `resumed` (load, two more).
"""

import hashlib
import random
import sys
from pathlib import Path

import numpy as np
import torch
from learner_parts import make_config, random_sample, small_llama, weighted

from agentrl.train.learner import Learner


def step(learner: Learner, number: int) -> float:
    generator = np.random.default_rng(number)
    samples = [random_sample(generator, length=9 + n, sampled=4) for n in range(5)]
    learner.forward_backward(weighted(samples), learner.config.algo)
    return learner.step().grad_norm


def digest(learner: Learner) -> str:
    weights = b"".join(weight.numpy().tobytes() for _, weight in learner.named_weights())
    return hashlib.sha256(weights).hexdigest()


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    learner = Learner(small_llama(), make_config(train={"lr": 1e-2}))
    if mode == "whole":
        for number in range(3):
            step(learner, number)
        random.random(), np.random.rand(), torch.rand(1)
        learner.save(folder)
    else:
        learner.load(folder)
    norms = [step(learner, number) for number in (3, 4)]
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    print(digest(learner), norms, drawn, learner.optimizer_steps)
    learner.close()


if __name__ == "__main__":
    main()
