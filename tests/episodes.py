"""Runs single episodes against the scripted engine, for the tests of executors."""

from __future__ import annotations

from chat_formats import make_tokenizer

from agentrl.chat import ChatFormat
from agentrl.config import RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.executors.base import AgentExecutor
from agentrl.executors.llm import LLM
from agentrl.executors.multi_turn import MultiTurnExecutor
from agentrl.types import Example, SamplingParams, Trajectory

CHAT = ChatFormat(make_tokenizer("chatml"))
QWEN = ChatFormat(make_tokenizer("qwen3"))


def speaking(*texts: str, chat: ChatFormat = CHAT, **options) -> ScriptedEngine:
    """An engine that says `texts` in turn, each with its end-of-turn token."""
    return ScriptedEngine(
        [[*chat.encode(text), chat.traits.end_token_id] for text in texts], **options
    )


def make_llm(engine: ScriptedEngine, *, chat: ChatFormat = CHAT, **options) -> LLM:
    sampling = SamplingParams(max_new_tokens=options.pop("max_new_tokens", 64))
    limits = {"max_turns": 8, "max_tokens": 1000, "rollout_id": "r0"} | options
    return LLM(engine, chat, sampling, **limits)


async def play(
    agent: type | AgentExecutor,
    engine: ScriptedEngine,
    example: Example | None = None,
    *,
    rollout: RolloutConfig | None = None,
    **options,
) -> Trajectory:
    """One episode of an instance class or an executor."""
    executor = agent
    if isinstance(agent, type):
        executor = MultiTurnExecutor(agent, rollout or RolloutConfig())
    return await executor.execute(example or {}, make_llm(engine, **options))
