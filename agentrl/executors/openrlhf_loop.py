"""OpenRLHF executors that write the whole loop themselves.

Their `execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)` speaks to an
engine in vLLM's terms and returns a dict of tokens and ranges. The engine given here remembers what
it sampled: ids, log-probabilities and policy versions are taken from there, and a range that holds
anything else is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from agentrl.chat.record import TokenRecord
from agentrl.config import DataConfig, RolloutConfig
from agentrl.errors import AgentError, UsageError
from agentrl.executors.base import AgentExecutor
from agentrl.executors.llm import LLM, join_generations
from agentrl.executors.openrlhf_row import label_of, prompt_of
from agentrl.executors.openrlhf_sampling import from_vllm_names, to_vllm_names
from agentrl.types import Example, Generation, Sequence, StopReason, Trajectory

__all__ = ["AgentExecutorBase"]


class AgentExecutorBase(AgentExecutor):
    """Subclass it and write `execute` with OpenRLHF's arguments."""

    needs_prompt = True
    _loop: ClassVar[Callable[..., Any] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        loop = cls.__dict__.get("execute")
        if loop is not None and "prompt" in inspect.signature(loop).parameters:
            # The run calls `execute(example, llm)`, which calls the file's own under this name.
            cls._loop = loop
            del cls.execute

    def configure(self, rollout: RolloutConfig, data: DataConfig) -> None:
        """Take the names of the row's fields."""
        self._data = data

    async def execute(self, example: Example, llm: LLM) -> Trajectory:
        """Run the file's loop and read the dict that it returns.

        Raises:
            UsageError: the class has no loop, or the row has no prompt.
            AgentError: the dict lacks something, or does not agree with what was sampled.
        """
        if self._loop is None:
            raise UsageError(
                f"{type(self).__name__} must define execute(self, prompt, label, sampling_params, "
                "max_length, hf_tokenizer, llm_engine)"
            )
        engine = _Engine(llm)
        result = await self._loop(
            prompt=prompt_of(example, self._data, llm.format),
            label=label_of(example, self._data),
            sampling_params=to_vllm_names(llm.sampling, {}),
            max_length=llm.max_tokens,
            hf_tokenizer=llm.format.tokenizer,
            llm_engine=engine,
        )
        if not isinstance(result, Mapping) or not {"observation_tokens", "action_ranges"} <= set(
            result
        ):
            raise AgentError(
                f"{type(self).__name__}.execute must return a dict with observation_tokens, "
                "action_ranges and reward"
            )
        sequence = _sequence(result, engine.generations)
        cut = sequence is not None and sequence.turns[-1].finish_reason == "length"
        trajectory = llm.trajectory(
            reward=result.get("reward"),
            score=result.get("scores"),
            stop_reason=StopReason.MAX_TOKENS if cut else StopReason.DONE,
            metrics={
                name: float(value) for name, value in (result.get("extra_logs") or {}).items()
            },
        )
        return replace(trajectory, sequences=() if sequence is None else (sequence,))


class _Engine:
    """`LLM` in the terms of OpenRLHF's engine; remembers every generation."""

    partial_rollout = False

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.generations: list[Generation] = []

    def get_weight_version(self) -> int:
        """The policy version that the next token is sampled from."""
        return self._llm.weight_version

    async def generate(
        self, prompt_token_ids: SequenceABC[int], sampling_params: Any, **_: Any
    ) -> SimpleNamespace:
        """Sample; the result has vLLM's fields."""
        generation = await self._llm.generate(prompt_token_ids, **from_vllm_names(sampling_params))
        self.generations.append(generation)
        token_ids = generation.token_ids.tolist()
        logprobs = None
        if generation.logprobs is not None:
            logprobs = [
                {token_id: SimpleNamespace(logprob=logprob)}
                for token_id, logprob in zip(token_ids, generation.logprobs.tolist(), strict=True)
            ]
        output = SimpleNamespace(
            token_ids=token_ids,
            text=self._llm.format.decode(token_ids),
            logprobs=logprobs,
            finish_reason=generation.finish_reason,
        )
        return SimpleNamespace(prompt_token_ids=list(prompt_token_ids), outputs=[output])


def _sequence(result: Mapping[str, Any], generations: list[Generation]) -> Sequence | None:
    """The sequence of a result; its ranges must hold the generations, in order."""
    token_ids = [int(token_id) for token_id in result["observation_tokens"]]
    record, waiting = TokenRecord(), list(generations)
    for start, end in result["action_ranges"]:
        record.extend(token_ids[len(record) : start])
        parts: list[Generation] = []
        while waiting and sum(len(part.token_ids) for part in parts) < end - start:
            parts.append(waiting.pop(0))
        turn = join_generations(parts) if parts else None
        if turn is None or turn.token_ids.tolist() != token_ids[start:end]:
            raise AgentError(
                f"the action range [{start}, {end}) does not hold what the engine sampled: "
                "action_ranges must cover every call of llm_engine.generate, in order"
            )
        record.sample(turn)
    if waiting:
        raise AgentError(
            f"{len(waiting)} calls of llm_engine.generate are in no action range: action_ranges "
            "must cover every call, in order"
        )
    return record.sequence()
