"""How far an engine's log-probabilities lie from the model's own, in bfloat16 and in float32.

The engine computes in bfloat16 with kernels of its own. What that costs is judged by what bfloat16
costs Hugging Face's implementation of the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agentrl.config import ModelConfig
from agentrl.models.load import load_policy
from agentrl.train.batch import build_samples
from agentrl.train.mismatch import plain_logprobs
from agentrl.types import Trajectory

__all__ = ["logprob_distance"]

CUT, LOW, HIGH = 2.0, 0.5, 2.0
"""The bound of `tis`, and those of `icepop`, as `algo.correction` has them by default."""


def logprob_distance(
    config: ModelConfig, policy: str, episodes: Sequence[Trajectory], most: int
) -> dict[str, float]:
    """Compare the sampled tokens of the first `most` scored episodes.

    Args:
        config: the section `model`; `policy` replaces its path.
        policy: the weights that sampled them, a folder or a .gguf file.
        episodes: each with the engine's log-probabilities.
        most: how many to compare.

    Returns:
        Means of absolute differences in nats (engine and `bfloat16`, which is Hugging Face's, to
        float32, and to each other); the mean ratio of the model in bfloat16 to the engine, with
        its standard error; the shares of tokens that `tis` would cut and `icepop` would mask.
    """
    chosen = [episode for episode in episodes if episode.reward is not None][:most]
    samples = build_samples(chosen, range(len(chosen)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_policy(config.model_copy(update={"path": policy, "dtype": "bfloat16"}), 0)
    model = model.to(device)
    rounded_N = np.concatenate(plain_logprobs(model, samples)).astype(np.float64)
    exact_N = np.concatenate(plain_logprobs(model.float(), samples)).astype(np.float64)
    reported = [s.sampler_logprobs for s in samples if s.sampler_logprobs is not None]
    engine_N = np.concatenate(reported).astype(np.float64)
    ratio_N = np.exp(rounded_N - engine_N)
    return {
        "tokens": float(len(engine_N)),
        "engine_to_float32": float(np.abs(engine_N - exact_N).mean()),
        "bfloat16_to_float32": float(np.abs(rounded_N - exact_N).mean()),
        "engine_to_bfloat16": float(np.abs(engine_N - rounded_N).mean()),
        "ratio_mean": float(ratio_N.mean()),
        "ratio_stderr": float(ratio_N.std() / len(ratio_N) ** 0.5),
        "tis_cuts": float((ratio_N > CUT).mean()),
        "icepop_masks": float(((ratio_N < LOW) | (ratio_N > HIGH)).mean()),
    }
