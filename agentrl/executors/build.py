"""What runs attempts, as the configuration says; the same in every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.chat import ChatFormat
from agentrl.config import Config
from agentrl.engines.base import Engine
from agentrl.executors.attempts import LocalAttempts
from agentrl.executors.base import AgentExecutor
from agentrl.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["local_attempts"]


def local_attempts(
    config: Config,
    executor: AgentExecutor,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: Sequence[int],
) -> LocalAttempts:
    """Attempts in this process.

    Args:
        config: the whole run.
        executor: runs one episode.
        engine: what samples.
        tokenizer: that of the model.
        end_token_ids: the end-of-turn tokens that the model's generation config names.
    """
    rollout = config.rollout
    chat = ChatFormat(
        tokenizer,
        history=rollout.history,
        tool_parser=rollout.tool_parser,
        generation_eos=end_token_ids,
    )
    sampling = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )
    return LocalAttempts(
        executor,
        engine,
        chat,
        sampling,
        rollout,
        seed=config.train.seed,
        logprobs_share=config.sampler_logprobs_share,
    )
