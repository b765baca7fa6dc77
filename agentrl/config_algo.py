"""The sections under `algo`: advantages, policy loss, correction, KL, value head.

A setting that the chosen estimator, loss or correction has no use for is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config_base import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)

__all__ = [
    "AdvantageConfig",
    "AlgoConfig",
    "CorrectionConfig",
    "KLConfig",
    "LossConfig",
    "ValueConfig",
]

_ESTIMATOR_SETTINGS: Mapping[str, frozenset[str]] = {
    "grpo": frozenset({"normalize_std", "drop_zero_variance"}),
    "dr_grpo": frozenset({"drop_zero_variance"}),
    "rloo": frozenset({"drop_zero_variance"}),
    "reinforce_plus_plus": frozenset({"gamma", "whiten"}),
    "reinforce_plus_plus_baseline": frozenset({"whiten", "drop_zero_variance"}),
    "turn_level": frozenset({"gamma", "normalize_std", "drop_zero_variance"}),
    "gae": frozenset({"gamma", "lam", "whiten"}),
}
"""Which fields each estimator uses; one that compares groups can leave groups out."""

_LOSS_SETTINGS: Mapping[str, frozenset[str]] = {
    "ppo": frozenset({"clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "old_logprobs"}),
    "gspo": frozenset({"clip_ratio_low", "clip_ratio_high", "old_logprobs"}),
    "cispo": frozenset({"clip_ratio_low", "clip_ratio_high", "old_logprobs"}),
    "sapo": frozenset({"tau_pos", "tau_neg", "old_logprobs"}),
    "reinforce": frozenset(),
}


class AdvantageConfig(Section):
    """How rewards become advantages."""

    estimator: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "turn_level",
        "gae",
    ] = "grpo"
    """`grpo`: reward less the group's mean, over its standard deviation (arXiv:2402.03300).
    `dr_grpo`: without the division (arXiv:2503.20783). `rloo`: reward less the mean of the others
    (arXiv:2402.14740). `reinforce_plus_plus`: discounted rewards to come, normalised over the batch
    (arXiv:2501.03262); `reinforce_plus_plus_baseline`: less the group's mean before that.
    `turn_level`: each turn's discounted rewards to come, compared with the same turn of the group.
    `gae`: generalized advantage estimation over the policy's own tokens (arXiv:1506.02438)."""
    normalize_std: bool = True
    """grpo, turn_level: divide by the group's standard deviation."""
    gamma: Fraction = 1.0
    """Discount of a later reward: per token (gae, reinforce_plus_plus) or per turn (turn_level)."""
    lam: Fraction = 0.95
    """gae: 0 trusts the value head, 1 the rewards."""
    whiten: bool = True
    """gae, reinforce_plus_plus(_baseline): normalise advantages over the whole batch."""
    drop_zero_variance: bool = True
    """Estimators that compare a group: leave out groups whose task scores are all equal."""

    @property
    def compares_groups(self) -> bool:
        """Whether the estimator needs several samples of one prompt."""
        return "drop_zero_variance" in _ESTIMATOR_SETTINGS[self.estimator]

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> AdvantageConfig:
        unused = set(type(self).model_fields) - {"estimator"} - _ESTIMATOR_SETTINGS[self.estimator]
        why = f"algo.advantage.estimator is {self.estimator}"
        self._refuse_ignored("algo.advantage", unused, why)
        return self


class LossConfig(Section):
    """The policy loss."""

    kind: Literal["ppo", "gspo", "cispo", "sapo", "reinforce"] = "ppo"
    """`ppo`: clipped ratio per token (arXiv:1707.06347). `gspo`: clipped ratio per sequence
    (arXiv:2507.18071). `cispo`: clipped weight, no token loses its gradient (arXiv:2506.13585).
    `sapo`: a soft gate in place of the clip (arXiv:2511.20347). `reinforce`: the plain policy
    gradient."""
    clip_ratio_low: PositiveFloat = 0.2
    """The importance ratio is clipped at 1 less this (gspo: 3e-4 in its paper) ..."""
    clip_ratio_high: PositiveFloat = 0.2
    """... and at 1 plus this (clip-higher: 0.28; gspo: 4e-4)."""
    clip_ratio_c: NonNegativeFloat = 0.0
    """ppo: where the advantage is negative the ratio counts as at most this, which is above 1
    (dual clip, arXiv:1912.09729; 3 is usual). 0: no such bound."""
    tau_pos: PositiveFloat = 1.0
    """sapo: how sharply the gate closes for positive advantages ..."""
    tau_neg: PositiveFloat = 1.05
    """... and for others."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Over the whole optimizer step, across micro-batches and ranks. `seq` is an episode; `norm`
    divides its sum by a constant length (arXiv:2503.20783)."""
    loss_scale_factor: PositiveInt | None = None
    """seq-mean-token-sum-norm: the constant length; without it, the most tokens that an episode can
    sample."""
    old_logprobs: Literal["learner", "sampler"] = "learner"
    """Whose log-probabilities are the denominator of the importance ratio; `sampler` has the
    engine asked for all of them (`rollout.logprobs`)."""
    mask_truncated: bool = False
    """Episodes that were cut give no gradient and no part of the denominator."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> LossConfig:
        unused = frozenset().union(*_LOSS_SETTINGS.values()) - _LOSS_SETTINGS[self.kind]
        self._refuse_ignored("algo.loss", unused, f"algo.loss.kind is {self.kind}")
        if self.aggregation != "seq-mean-token-sum-norm":
            why = f"algo.loss.aggregation is {self.aggregation}"
            self._refuse_ignored("algo.loss", {"loss_scale_factor"}, why)
        if 0 < self.clip_ratio_c <= 1:
            raise ValueError(
                f"algo.loss.clip_ratio_c is {self.clip_ratio_c}, but it bounds ratios from above: "
                "set it to more than 1, or to 0 for no bound"
            )
        return self


class KLConfig(Section):
    """Distance to the reference policy (the policy before training)."""

    coef: NonNegativeFloat = 0.0
    """0: no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """http://joschu.net/blog/kl-approx.html"""
    in_reward: bool = False
    """Take it from each token's reward (usual with k1) rather than add it to the loss."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> KLConfig:
        if self.coef == 0:
            self._refuse_ignored("algo.kl", {"estimator", "in_reward"}, "algo.kl.coef is 0")
        return self


class ValueConfig(Section):
    """The values that `gae` needs."""

    model: Literal["shared", "separate"] = "shared"
    """`shared`: a head on the policy's last hidden state. `separate`: a second copy of the model,
    which costs as much memory and time again, but neither disturbs the other."""
    lr: PositiveFloat | None = None
    """separate: its learning rate; without it, `train.lr`."""
    coef: NonNegativeFloat = 0.5
    clip: NonNegativeFloat = 0.2
    """0: no clipping of the value loss."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> ValueConfig:
        if self.model == "shared":
            why = "algo.value.model is shared: its head learns with the policy at train.lr"
            self._refuse_ignored("algo.value", {"lr"}, why)
        return self


class CorrectionConfig(Section):
    """Importance weights for engines that do not sample from quite the learner's distribution.

    A ratio is the probability under the learner, before the update, over that under the sampler.
    """

    kind: Literal["none", "tis", "icepop", "mask", "seq_tis", "seq_mask"] = "none"
    """`tis`: each token's loss is multiplied by its ratio, at most `high`. `icepop`: by its ratio
    within [low, high], by 0 outside (arXiv:2510.18855). `mask`: by 1 within, by 0 outside.
    `seq_tis` and `seq_mask`: the same by the ratio of the whole sequence."""
    low: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Least ratio that is kept (icepop, mask, seq_mask)."""
    high: Annotated[float, Field(ge=1)] = 2.0
    """Most: a larger one is cut to it (tis, seq_tis) or masked."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> CorrectionConfig:
        unused = {"none": {"low", "high"}, "tis": {"low"}, "seq_tis": {"low"}}.get(self.kind, set())
        self._refuse_ignored("algo.correction", unused, f"algo.correction.kind is {self.kind}")
        return self


class AlgoConfig(Section):
    """The reinforcement-learning algorithm."""

    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    value: ValueConfig = ValueConfig()
    entropy_coef: float = 0.0
    """Positive rewards entropy."""

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Whether the loss reads the log-probabilities that the engine reported."""
        return self.correction.kind != "none" or self.loss.old_logprobs == "sampler"

    @model_validator(mode="after")
    def _check_combinations(self) -> AlgoConfig:
        if self.advantage.estimator != "gae" and self.value != ValueConfig():
            raise ValueError(
                f"algo.value would be ignored, since algo.advantage.estimator is "
                f"{self.advantage.estimator}, which has no value head: remove it, or use gae"
            )
        if self.correction.kind != "none" and self.loss.old_logprobs == "sampler":
            raise ValueError(
                f"algo.correction.kind {self.correction.kind} corrects nothing when "
                "algo.loss.old_logprobs is sampler, since the ratio is then taken to the sampler "
                "already: set algo.loss.old_logprobs learner, or algo.correction.kind none"
            )
        if self.kl.in_reward and self.loss.mask_truncated:
            raise ValueError(
                "algo.kl.in_reward with algo.loss.mask_truncated would compare rewards with and "
                "without their KL, since episodes that are masked have none: set one of them false"
            )
        return self
