"""An evaluation tells what its engine did, and how far that is from the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from learner_parts import full_logprobs, make_config, small_llama, trajectory

from agentrl.config import Config
from agentrl.train.evaluate import evaluate
from agentrl.train.learner import Learner
from agentrl.train.mismatch import (
    COMPARED_TOKENS,
    plain_logprobs,
    sample_mismatch,
    samples_to_compare,
)
from agentrl.view.eval_table import print_eval

AGENT = Path(__file__).parents[2] / "examples" / "agents" / "number_guess.py"


def test_an_evaluation_reports_the_engines_metrics_and_its_mismatch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(
        agent=AGENT,
        data={"max_samples": 4},  # type: ignore[arg-type]
        rollout={"max_turns": 2, "max_new_tokens": 3, "max_tokens": 160, "temperature": 0.6},  # type: ignore[arg-type]
    )
    result = evaluate(config)
    metrics = result.metrics
    turns = round(result.turns_mean * result.episodes)
    assert metrics["engine/requests"] == turns
    assert metrics["engine/sampled_tokens"] == result.sampled_tokens_mean * result.episodes
    assert 0 < metrics["engine/ttft_mean"] <= metrics["engine/request_latency_p99"]
    # the embedded engine samples from the model itself: apart by rounding only
    assert metrics["mismatch/log_ratio_max"] < 1e-4
    print_eval(result)
    shown = capsys.readouterr().out
    assert "time to first token" in shown
    assert "sampler-learner KL" in shown
    print_eval(result, as_json=True)
    assert json.loads(capsys.readouterr().out)["metrics"]["engine/requests"] == turns


def test_episodes_are_compared_until_their_tokens_are_many() -> None:
    episodes = [trajectory(1.0, turns=(1000,) * 3, seed=seed) for seed in range(4)]
    assert len(samples_to_compare(episodes)) == 2  # of 3010 tokens each
    assert COMPARED_TOKENS == 8192


def test_only_episodes_with_logprobs_are_compared() -> None:
    asked, unasked = trajectory(1.0), trajectory(1.0, logprobs=False)
    assert [s.episode for s in samples_to_compare([unasked, asked, unasked])] == [0]
    assert samples_to_compare([trajectory(None, turns=())]) == []


def test_the_mismatch_is_the_one_that_a_plain_forward_pass_and_the_learner_tell() -> None:
    samples = samples_to_compare([trajectory(1.0, seed=seed) for seed in range(3)])
    samples = [s.with_fields(temperatures=np.full(s.num_sampled, 0.7)) for s in samples]
    model = small_llama()
    plain = plain_logprobs(model, samples)
    for sample, logprobs_R in zip(samples, plain, strict=True):
        expected = full_logprobs(model, sample, 0.7).detach().numpy()
        np.testing.assert_allclose(logprobs_R, expected, atol=1e-5)
    learner = Learner(small_llama(), make_config())
    by_learner = sample_mismatch(samples, learner.logprobs(samples))
    learner.close()
    assert sample_mismatch(samples, plain) == pytest.approx(by_learner, abs=1e-5)
    # the sampler said -3.0 of every token
    distance = np.abs(np.concatenate(plain) + 3.0)
    assert by_learner["mismatch/log_ratio_max"] == pytest.approx(distance.max(), abs=1e-4)
    assert by_learner["mismatch/log_ratio_mean"] == pytest.approx(distance.mean(), abs=1e-4)
