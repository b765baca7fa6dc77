"""Runs an agent without training it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from agentrl import event_loop
from agentrl.config import Config
from agentrl.config_engine import SERVER_KINDS
from agentrl.cursor import all_groups
from agentrl.data import Examples, load_examples
from agentrl.engines.base import WeightSource
from agentrl.engines.installed import check_python
from agentrl.errors import UsageError
from agentrl.models.load import load_policy, load_tokenizer
from agentrl.plugin import load_agent
from agentrl.train.eval_result import EvalResult, summarize
from agentrl.train.mismatch import plain_logprobs, sample_mismatch, samples_to_compare
from agentrl.train.sampler import Sampler, build_engine
from agentrl.train.stats import engine_metrics
from agentrl.types import Trajectory

__all__ = ["evaluate"]

logger = logging.getLogger(__name__)


def evaluate(config: Config) -> EvalResult:
    """Sample every example of the evaluation set `train.eval_samples_per_prompt` times.

    Raises:
        UsageError: something about the configuration, agent, data or model is wrong.
        AgentRLError: the agent or the engine fails in every episode.
    """
    agent = load_agent(config.agent)
    examples = load_examples(config.data, agent, evaluation=True)
    check_python(config.engine)
    executor = agent.make_executor(config.rollout, config.data)
    tokenizer = load_tokenizer(config.model)
    policy = load_policy(config.model, config.train.seed)
    weights = WeightSource(lambda: iter(policy.named_parameters()), version=0, live=True)

    def save_model(folder: Path) -> None:
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    with TemporaryDirectory(prefix="agentrl-eval-") as scratch:
        engine = build_engine(
            config, policy.config, tokenizer, run_dir=Path(scratch), save_model=save_model
        )
        sampler = Sampler(config, executor, engine, tokenizer, policy.generation_config)
        result, outcomes = event_loop.run(_evaluate(config, sampler, examples, weights))
    mismatch = _mismatch(policy, outcomes)
    return replace(result, metrics={**result.metrics, **mismatch})


def _mismatch(policy: PreTrainedModel, outcomes: Sequence[Trajectory]) -> dict[str, float]:
    compared = samples_to_compare(outcomes)
    if not compared:
        return {}
    try:
        return sample_mismatch(compared, plain_logprobs(policy, compared))
    except UsageError as error:  # a model that can be sampled from but not trained
        logger.warning("the engine was not compared with the model: %s", error)
        return {}


async def _evaluate(
    config: Config, sampler: Sampler, examples: Examples, weights: WeightSource
) -> tuple[EvalResult, Sequence[Trajectory]]:
    async with sampler:
        if config.engine.kind not in SERVER_KINDS:  # a server has read the model folder itself
            await sampler.engine.update_weights(weights)
        groups = all_groups(examples, config.train.eval_samples_per_prompt, prefix="eval-")
        rollout = await sampler.run(groups)
        await sampler.engine.refresh_stats()
        metrics = engine_metrics(sampler.engine.stats())
    for warning in rollout.warnings.values():
        logger.warning("%s", warning)
    return replace(summarize(rollout.outcomes), metrics=metrics), rollout.outcomes
