"""What an executor drives one episode with: the engine, the chat format and the budget, together.

`generate` takes and gives tokens, `chat` messages. Both count against one budget: no call asks the
engine for more than `max_tokens` tokens of context, and none is made where no token would fit.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from agentrl.chat import ChatFormat, Conversation
from agentrl.chat.record import join_routes
from agentrl.engines.base import Engine
from agentrl.errors import AgentError, ContextOverflowError, EngineError, UsageError
from agentrl.executors.dialogues import Dialogues
from agentrl.executors.normalize import as_number, as_observation
from agentrl.types import (
    Action,
    Generation,
    Message,
    Observation,
    SamplingParams,
    StopReason,
    Timings,
    Trajectory,
)

__all__ = ["LLM", "Reply", "join_generations"]

_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_MAX_EMPTY_ABORTS = 100


@dataclass(frozen=True, slots=True)
class Reply:
    """What `LLM.chat` gives: a message to append to the history, and the exact turn behind it."""

    message: Message
    action: Action


class LLM:
    """The policy, as one episode sees it.

    Args:
        engine: what samples.
        chat: the model's chat format.
        sampling: parameters of every call; shared by all episodes and never changed.
        max_turns: most turns of the episode.
        max_tokens: most tokens of one context, everything counted.
        rollout_id, group_id: whose cached prefix the engine should look for; "" for a group of one.
        seed: the calls' seeds are derived from it, the rollout_id and the index of the call, where
            the engine repeats by them.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        sampling: SamplingParams,
        *,
        max_turns: int,
        max_tokens: int,
        rollout_id: str = "",
        group_id: str = "",
        seed: int = 0,
    ) -> None:
        self.format = chat
        self.rollout_id = rollout_id
        self.max_turns = max_turns
        self.max_tokens = min(max_tokens, engine.max_model_len)
        self.sampling = replace(
            sampling,
            stop_token_ids=_union(sampling.stop_token_ids, chat.end_token_ids),
        )
        self.engine_seconds = 0.0
        self._engine = engine
        self._group_id = group_id
        self._seed = seed
        self._num_calls = 0
        self._conversations: list[Conversation] = []
        self._dialogues = Dialogues(chat)
        self._cut: StopReason | None = None

    @property
    def weight_version(self) -> int:
        """The policy version that the next token is sampled from."""
        return self._engine.weight_version

    def room(self, length: int) -> int:
        """How many tokens may follow a context of `length`; 0 or less when it is full."""
        return self.max_tokens - length

    def conversation(
        self, observation: Observation | str | SequenceABC[Message] | None = None
    ) -> Conversation:
        """A new context, whose sequences will be part of the trajectory.

        `observation` may be whatever `AgentInstance.reset` may return; None leaves it empty.

        Raises:
            AgentError: `observation` is no such thing.
            UsageError: the first prompt leaves no room for an answer.
        """
        if observation is not None:
            observation = as_observation(observation, "llm.conversation was given")
        conversation = self.format.conversation(observation)
        if self.room(len(conversation)) < 1:
            raise UsageError(
                f"the first prompt has {len(conversation)} tokens and the context holds "
                f"{self.max_tokens}, which leaves none for an answer: raise rollout.max_tokens "
                "(and engine.max_model_len), or shorten the prompt"
            )
        self._conversations.append(conversation)
        return conversation

    async def generate(
        self, token_ids: SequenceABC[int], *, ignore_eos: bool = False, **overrides: Any
    ) -> Generation:
        """Sample a continuation of `token_ids`.

        `overrides` replace fields of the `SamplingParams` for this call. `max_new_tokens` never
        exceeds the room that is left. Every end-of-turn token of the format stops the turn, unless
        `ignore_eos`: then nothing does, and it ends with `max_new_tokens` tokens by `length`, like
        any answer that was cut. (`min_new_tokens` keeps such tokens from being sampled.)
        A call that the engine aborts (to take new weights, say) goes on from its tokens so far.

        Raises:
            AgentError: an override is not a field of `SamplingParams`, or not a possible value; or
                a turn that nothing ends is given tokens that do.
            ContextOverflowError: there is no room for one token; count with `room` first.
            EngineError: the engine failed.
        """
        room = self.room(len(token_ids))
        if room < 1:
            raise ContextOverflowError(
                f"{len(token_ids)} tokens leave no room in a context of {self.max_tokens}: "
                "end the episode when llm.room(length) is below 1"
            )
        params = self._params(overrides, room, ignore_eos=ignore_eos)
        begun = time.perf_counter()
        try:
            generation = await self._sample(list(token_ids), params)
        finally:
            self.engine_seconds += time.perf_counter() - begun
        return replace(generation, temperature=params.temperature)

    async def chat(
        self,
        messages: SequenceABC[Message],
        tools: SequenceABC[Mapping[str, Any]] = (),
        **overrides: Any,
    ) -> Reply:
        """Sample the next assistant message.

        A history that begins with one seen before, replies included, continues its tokens;
        any other begins a new context. Where the budget is spent (turns or tokens) the reply is
        empty with finish reason `length`, no engine call is made, and the trajectory says so.

        Raises:
            UsageError: the very first prompt leaves no room for an answer.
        """
        dialogue, observation = self._dialogues.find(messages, tools)
        conversation = dialogue.conversation
        num_turns = sum(each.num_turns for each in self._conversations)
        if num_turns >= self.max_turns:
            return await self._refuse(StopReason.MAX_TURNS, num_turns)
        if self.room(conversation.length_with(observation)) < 1:
            if num_turns == 0:
                self.conversation(observation)
            return await self._refuse(StopReason.MAX_TOKENS, num_turns)
        if conversation not in self._conversations:
            self._conversations.append(conversation)
        conversation.append(observation)
        action = conversation.take(await self.generate(conversation.token_ids, **overrides))
        message = self.format.assistant_message(action)
        self._dialogues.remember(dialogue, [*messages, message])
        return Reply(message, action)

    def trajectory(
        self,
        conversation: Conversation | None = None,
        *,
        reward: Any,
        stop_reason: StopReason = StopReason.DONE,
        score: Any = None,
        metrics: Mapping[str, float] | None = None,
        env_seconds: float = 0.0,
    ) -> Trajectory:
        """The result of the episode.

        Args:
            conversation: whose sequences to train on; None takes every context of the episode.
            reward: a finite number, or None where the episode cannot be scored.
            stop_reason: DONE becomes MAX_TURNS or MAX_TOKENS where `chat` had to refuse a call.
            score: the task's own measure; without it, the reward.
            metrics: averaged over episodes into the log.
            env_seconds: time spent outside the engine.
        """
        conversations = self._conversations if conversation is None else [conversation]
        if stop_reason is StopReason.DONE and self._cut is not None:
            stop_reason = self._cut
        reward = None if reward is None else as_number(reward, "reward")
        return Trajectory(
            sequences=tuple(seq for each in conversations for seq in each.sequences()),
            reward=reward,
            stop_reason=stop_reason,
            group_id=self._group_id,
            rollout_id=self.rollout_id,
            score=reward if score is None else as_number(score, "score"),
            metrics=dict(metrics or {}),
            timings=Timings(engine=self.engine_seconds, env=env_seconds),
            messages=tuple(message for each in conversations for message in each.messages),
        )

    def _params(
        self, overrides: Mapping[str, Any], room: int, *, ignore_eos: bool
    ) -> SamplingParams:
        unknown = overrides.keys() - _SAMPLING_FIELDS
        if unknown:
            raise AgentError(
                f"the agent sets the sampling parameters {', '.join(sorted(unknown))}, which do "
                f"not exist: use {', '.join(sorted(_SAMPLING_FIELDS | {'ignore_eos'}))}"
            )
        base, changed = self.sampling, dict(overrides)
        if ignore_eos and overrides.get("stop_token_ids"):
            raise AgentError(
                "the agent asks for a turn with ignore_eos, which nothing ends, and sets "
                "stop_token_ids: leave out one of them"
            )
        if changed.get("seed", base.seed) is None:
            changed["seed"] = self._next_seed()
        try:
            if "stop_token_ids" in changed:
                changed["stop_token_ids"] = _union(changed["stop_token_ids"], base.stop_token_ids)
            if ignore_eos:
                changed |= {"stop_token_ids": (), "min_new_tokens": 0}
            if changed.get("max_new_tokens", base.max_new_tokens) > room:
                changed["max_new_tokens"] = room
                changed["min_new_tokens"] = min(
                    changed.get("min_new_tokens", base.min_new_tokens), room
                )
            return replace(base, **changed)
        except (TypeError, ValueError) as error:
            raise AgentError(f"the agent's sampling parameters are impossible: {error}") from error

    async def _sample(self, context: list[int], params: SamplingParams) -> Generation:
        """One turn, over as many engine calls as aborts make of it."""
        parts: list[Generation] = []
        num_empty, rest = 0, params
        while True:
            part = await self._engine.generate(
                context, rest, rollout_id=self.rollout_id, group_id=self._group_id
            )
            parts.append(part)
            if part.finish_reason != "abort":
                return join_generations(parts)
            sampled = len(part.token_ids)
            if sampled >= rest.max_new_tokens:
                return replace(join_generations(parts), finish_reason="length")
            num_empty = 0 if sampled else num_empty + 1
            if num_empty >= _MAX_EMPTY_ABORTS:
                raise EngineError(
                    f"the engine aborted a call {num_empty} times without a token: it is paused "
                    "with no resume to follow, or broken"
                )
            context = context + part.token_ids.tolist()
            rest = replace(
                rest,
                max_new_tokens=rest.max_new_tokens - sampled,
                min_new_tokens=max(rest.min_new_tokens - sampled, 0),
                seed=self._next_seed(),
            )

    def _next_seed(self) -> int | None:
        if not self._engine.repeats:
            return None
        text = f"{self._seed}/{self.rollout_id}/{self._num_calls}"
        self._num_calls += 1
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    async def _refuse(self, reason: StopReason, turn_index: int) -> Reply:
        self._cut = reason
        # An agent that calls again and again must still let other episodes, and its own time
        # limit, come to their turn.
        await asyncio.sleep(0)
        action = Action("", (), "length", turn_index)
        return Reply({"role": "assistant", "content": ""}, action)


def _union(first: SequenceABC[int], second: SequenceABC[int] | frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted({*first, *second}))


def join_generations(parts: list[Generation]) -> Generation:
    """One turn out of the parts that aborts left of it.

    Raises:
        EngineError: only some parts have log-probabilities, or experts.
    """
    if len(parts) == 1:
        return parts[0]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    if len(logprobs) not in (0, len(parts)):
        raise EngineError(
            f"the engine gave log-probabilities for {len(logprobs)} of {len(parts)} parts of an "
            "aborted turn: ask for them in every call or in none"
        )
    told = [part for part in parts if len(part.token_ids)]
    computed = max((len(r) for p in told if (r := p.routed_experts) is not None), default=0)
    return Generation(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate(logprobs) if logprobs else None,
        weight_versions=np.concatenate([part.weight_versions for part in parts]),
        finish_reason=parts[-1].finish_reason,
        cached_tokens=parts[0].cached_tokens,
        routed_experts=join_routes(told, computed),
    )
