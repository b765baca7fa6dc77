"""The distance between sampler and learner, on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.engines.mismatch import mismatch_metrics


def test_equal_logprobs_have_no_distance() -> None:
    logprobs = np.array([-1.0, -2.0], np.float32)
    metrics = mismatch_metrics(logprobs, logprobs, np.array([True, True]))
    assert metrics.pop("mismatch/ratio_mean") == 1.0
    assert set(metrics.values()) == {0.0}


def test_means_maximum_and_k3_over_the_mask_alone() -> None:
    sampler = np.array([np.nan, -1.0, -2.0, -3.0], np.float32)
    learner = np.array([np.nan, -1.5, -1.0, -3.0], np.float32)
    metrics = mismatch_metrics(sampler, learner, np.array([False, True, True, True]))
    assert metrics["mismatch/log_ratio_mean"] == pytest.approx(0.5)
    assert metrics["mismatch/log_ratio_max"] == pytest.approx(1.0)
    # (e^-0.5 + e^1 + 1) / 3
    assert metrics["mismatch/ratio_mean"] == pytest.approx(4.3248125 / 3, rel=1e-6)
    # (e^-0.5 - 1 + 0.5 + e^1 - 1 - 1 + 0) / 3
    assert metrics["mismatch/kl"] == pytest.approx((0.1065307 + 0.7182818) / 3, rel=1e-5)


def test_a_sampled_token_without_a_logprob_is_an_error() -> None:
    with pytest.raises(ValueError, match="no log-probability"):
        mismatch_metrics(np.array([np.nan]), np.array([-1.0]), np.array([True]))


def test_an_empty_mask_gives_no_metrics() -> None:
    assert mismatch_metrics(np.array([np.nan]), np.array([np.nan]), np.array([False])) == {}
