"""What of the algorithm's configuration would be ignored or cannot work, and what it says then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config import Config
from agentrl.config_algo import _ESTIMATOR_SETTINGS, _LOSS_SETTINGS, AdvantageConfig, LossConfig


def complaint(**sections: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Config(agent=Path("a.py"), **sections)
    (error,) = caught.value.errors()
    return error["msg"].removeprefix("Value error, ")


@pytest.mark.parametrize(
    ("algo", "words"),
    [
        ({"advantage": {"lam": 0.9}}, "algo.advantage.lam would be ignored, since "
         "algo.advantage.estimator is grpo: remove it"),
        ({"advantage": {"estimator": "dr_grpo", "normalize_std": False}}, "normalize_std would be"),
        ({"advantage": {"estimator": "gae", "drop_zero_variance": False}}, "drop_zero_variance"),
        ({"loss": {"kind": "sapo", "clip_ratio_low": 0.1}}, "algo.loss.clip_ratio_low would be "
         "ignored, since algo.loss.kind is sapo"),
        ({"loss": {"kind": "gspo", "clip_ratio_c": 3.0}}, "algo.loss.clip_ratio_c would be"),
        ({"loss": {"kind": "reinforce", "old_logprobs": "sampler"}}, "algo.loss.old_logprobs"),
        ({"loss": {"tau_pos": 2.0}}, "algo.loss.tau_pos would be ignored"),
        ({"loss": {"loss_scale_factor": 100}}, "since algo.loss.aggregation is token-mean"),
        ({"loss": {"clip_ratio_c": 0.9}}, "set it to more than 1, or to 0 for no bound"),
        ({"kl": {"in_reward": True}}, "since algo.kl.coef is 0"),
        ({"value": {"coef": 1.0}}, "algo.value would be ignored"),
        ({"correction": {"high": 3.0}}, "since algo.correction.kind is none"),
        ({"correction": {"kind": "tis", "low": 0.1}}, "algo.correction.low would be ignored"),
        ({"correction": {"kind": "tis"}, "loss": {"old_logprobs": "sampler"}},
         "corrects nothing when algo.loss.old_logprobs is sampler"),
        ({"kl": {"coef": 0.1, "in_reward": True}, "loss": {"mask_truncated": True}},
         "set one of them false"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_or_sense_is_refused(algo: dict[str, Any], words: str) -> None:
    assert words in complaint(algo=algo)


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"fail_fast": True, "max_retries": 3}, "since rollout.fail_fast ends the run before"),
        ({"max_retries": 0, "retry_pause": 2.0}, "since rollout.max_retries is 0"),
        ({"overlong_buffer": {"penalty_factor": 0.5}}, "since rollout.overlong_buffer.len is 0"),
        ({"overlong_buffer": {"len": 300}}, "every episode would be punished: lower it"),
    ],
)
def test_a_rollout_setting_without_effect_is_refused(rollout: dict[str, Any], words: str) -> None:
    assert words in complaint(rollout=rollout)


@pytest.mark.parametrize(
    ("engine", "algo", "words"),
    [
        ("transformers", {"correction": {"kind": "tis"}}, "samples from the learner's own"),
        ("vllm", {}, "whose ratio to the newest must be known"),
    ],
)
def test_what_cannot_run_ahead_of_training_is_refused(
    engine: str, algo: dict[str, Any], words: str
) -> None:
    message = complaint(train={"max_staleness": 1}, engine={"kind": engine}, algo=algo)
    assert words in message


def test_what_becomes_of_old_tokens_is_refused_where_there_are_none() -> None:
    assert "train.stale would be ignored" in complaint(train={"stale": "drop"})


@pytest.mark.parametrize(
    "estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "turn_level"]
)
def test_an_estimator_that_compares_a_group_needs_two_samples(estimator: str) -> None:
    message = complaint(
        rollout={"n_samples_per_prompt": 1}, algo={"advantage": {"estimator": estimator}}
    )
    assert f"algo.advantage.estimator {estimator} compares" in message


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_one_sample_is_enough_for_the_others(estimator: str) -> None:
    algo = {"advantage": {"estimator": estimator}}
    Config(agent=Path("a.py"), rollout={"n_samples_per_prompt": 1}, algo=algo)


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 5}])
@pytest.mark.parametrize(
    ("algo", "remedy"),
    [
        ({"loss": {"old_logprobs": "sampler"}}, "set algo.loss.old_logprobs learner"),
        ({"correction": {"kind": "icepop"}}, "set algo.correction.kind none"),
    ],
)
def test_truncated_sampling_has_no_ratio_to_the_learner(
    truncation: dict[str, Any], algo: dict[str, Any], remedy: str
) -> None:
    assert remedy in complaint(rollout=truncation, algo=algo)


def test_every_setting_is_of_some_estimator_or_loss() -> None:
    everywhere = {"estimator"}.union(*_ESTIMATOR_SETTINGS.values())
    assert everywhere == set(AdvantageConfig.model_fields)
    everywhere = {"kind", "aggregation", "loss_scale_factor", "mask_truncated"}
    assert everywhere.union(*_LOSS_SETTINGS.values()) == set(LossConfig.model_fields)


@pytest.mark.parametrize(
    ("sections", "share"),
    [
        ({}, 1.0),
        ({"engine": {"kind": "sglang"}}, 1.0),
        ({"engine": {"kind": "vllm"}}, 0.05),
        ({"engine": {"kind": "vllm"}, "rollout": {"logprobs_share": 0.5}}, 0.5),
        ({"engine": {"kind": "vllm"}, "rollout": {"logprobs": "sampler"}}, 1.0),
        ({"engine": {"kind": "vllm"}, "algo": {"correction": {"kind": "tis"}}}, 1.0),
        ({"engine": {"kind": "vllm"}, "algo": {"loss": {"old_logprobs": "sampler"}}}, 1.0),
        ({"rollout": {"logprobs": "learner"}}, 0.05),
        ({"engine": {"kind": "sglang"}, "rollout": {"top_p": 0.9}}, 0.0),
        ({"engine": {"kind": "vllm"}, "rollout": {"top_k": 5, "logprobs": "learner"}}, 0.0),
    ],
)
def test_the_engine_is_asked_for_logprobs_where_they_are_needed_or_free(
    sections: dict[str, Any], share: float
) -> None:
    assert Config(agent=Path("a.py"), **sections).sampler_logprobs_share == share


@pytest.mark.parametrize(
    ("rollout", "algo", "words"),
    [
        ({"logprobs": "learner"}, {"correction": {"kind": "tis"}}, "set rollout.logprobs auto"),
        ({"logprobs": "learner"}, {"loss": {"old_logprobs": "sampler"}}, "rollout.logprobs auto"),
        ({"logprobs": "sampler", "top_p": 0.9}, {}, "cannot be compared with the learner's"),
        ({"logprobs": "sampler", "logprobs_share": 0.5}, {}, "rollout.logprobs_share would be"),
        ({"logprobs_share": 0.5}, {}, "since the engine is asked on every episode"),
        ({"logprobs": "learner", "top_k": 5, "logprobs_share": 0.5}, {}, "no engine is asked"),
    ],
)
def test_logprobs_that_the_loss_lacks_or_nobody_could_use_are_refused(
    rollout: dict[str, Any], algo: dict[str, Any], words: str
) -> None:
    assert words in complaint(rollout=rollout, algo=algo)


@pytest.mark.parametrize(
    ("kind", "temperature"), [("vllm", 2.5), ("vllm", 0.005), ("sglang", 1e-7)]
)
def test_a_temperature_that_the_server_does_not_sample_at_is_refused(
    kind: str, temperature: float
) -> None:
    said = complaint(engine={"kind": kind}, rollout={"temperature": temperature})
    assert f"{kind} samples at temperatures from" in said
    assert Config(agent=Path("a.py"), rollout={"temperature": 2.5}).engine.kind == "transformers"
