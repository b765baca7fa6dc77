"""Everything that samples, put together: agent, engine, attempts and rollout scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from agentrl.config import Config
from agentrl.config_engine import SERVER_KINDS
from agentrl.engines.base import Engine
from agentrl.engines.embedded.weights import skeleton
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.errors import UsageError
from agentrl.executors.attempts import Attempts
from agentrl.executors.base import AgentExecutor
from agentrl.executors.build import local_attempts
from agentrl.executors.groups import GroupRequest, RolloutResult
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.executors.workers.attempts import ProcessAttempts
from agentrl.types import Trajectory

__all__ = ["Sampler", "build_engine"]


class Sampler:
    """Samples groups of episodes of one executor on one engine; it closes both.

    Use it as an asynchronous context.
    """

    def __init__(
        self,
        config: Config,
        executor: AgentExecutor,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        generation: GenerationConfig | None,
    ) -> None:
        self.engine = engine
        self._executor = executor
        end_token_ids = _end_token_ids(generation)
        self._attempts: Attempts
        if config.rollout.num_processes > 1:
            assert isinstance(engine, EnginePool), "the configuration allows servers only"
            self._attempts = ProcessAttempts(config, engine, end_token_ids)
        else:
            self._attempts = local_attempts(config, executor, engine, tokenizer, end_token_ids)
        self._scheduler = RolloutScheduler(self._attempts, config.rollout)

    async def run(
        self,
        requests: Iterable[GroupRequest],
        on_trajectory: Callable[[Trajectory], None] | None = None,
        *,
        patience: int | None = None,
    ) -> RolloutResult:
        """Sample every member of every group; see `RolloutScheduler.run`."""
        return await self._scheduler.run(requests, on_trajectory, patience=patience)

    async def __aenter__(self) -> Sampler:
        try:
            async with asyncio.TaskGroup() as starting:  # both take seconds
                starting.create_task(self.engine.start())
                starting.create_task(self._attempts.start())
        except BaseExceptionGroup as group:
            await self.__aexit__()
            raise group.exceptions[0] from None
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._attempts.close()
        finally:
            try:
                await self._executor.close()
            finally:
                await self.engine.close()


def build_engine(
    config: Config,
    policy: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    run_dir: Path,
    save_model: Callable[[Path], None],
) -> Engine:
    """Build the engine that the configuration names; its first weights are those it is given.

    Args:
        config: the whole run.
        policy: the model's own configuration.
        tokenizer: encodes the lines of a script.
        run_dir: where servers log.
        save_model: writes the policy as a Hugging Face folder, for servers to start from where
            `model.path` is none.

    Raises:
        UsageError: the model is too short for the episodes, or what the kind needs is missing.
    """
    _check_context(config, policy)
    folder = Path(config.model.path)
    if config.engine.kind in SERVER_KINDS and not (folder / "config.json").is_file():
        folder = run_dir / "engine-model"
        # Where adapters travel it holds the base, which a resumed run's merged weights are not.
        if not (config.sends_adapter and (folder / "config.json").is_file()):
            save_model(folder)
    module = None
    if config.engine.kind == "transformers":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        module = skeleton(policy, getattr(torch, config.model.dtype), device)
    return make_engine(
        config, run_dir=run_dir, model_folder=folder, module=module, tokenizer=tokenizer
    )


def _end_token_ids(generation: GenerationConfig | None) -> Sequence[int]:
    eos: int | list[int] | None = getattr(generation, "eos_token_id", None)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else eos


def _check_context(config: Config, policy: PretrainedConfig) -> None:
    wanted = config.engine.max_model_len or config.rollout.max_tokens
    limit = getattr(policy.get_text_config(), "max_position_embeddings", None)
    if limit is not None and wanted > limit:
        flag = "engine.max_model_len" if config.engine.max_model_len else "rollout.max_tokens"
        raise UsageError(
            f"{flag} is {wanted}, but {config.model.path} holds at most {limit} tokens: lower it"
        )
