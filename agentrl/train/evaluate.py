"""Runs an agent without training it."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl import event_loop
from agentrl.config import Config
from agentrl.config_engine import SERVER_KINDS
from agentrl.cursor import all_groups
from agentrl.data import Examples, load_examples
from agentrl.engines.base import WeightSource
from agentrl.models.load import load_policy, load_tokenizer
from agentrl.plugin import load_agent
from agentrl.train.eval_result import EvalResult, summarize
from agentrl.train.sampler import Sampler, build_engine

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
        return event_loop.run(_evaluate(config, sampler, examples, weights))


async def _evaluate(
    config: Config, sampler: Sampler, examples: Examples, weights: WeightSource
) -> EvalResult:
    async with sampler:
        if config.engine.kind not in SERVER_KINDS:  # a server has read the model folder itself
            await sampler.engine.update_weights(weights)
        groups = all_groups(examples, config.train.eval_samples_per_prompt, prefix="eval-")
        rollout = await sampler.run(groups)
    for warning in rollout.warnings.values():
        logger.warning("%s", warning)
    return summarize(rollout.outcomes)
