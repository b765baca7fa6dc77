"""The agent of `rollout_processes.py`: turns of sampled tokens and feedback."""

from __future__ import annotations

from agentrl import AgentExecutor
from agentrl.executors.llm import LLM
from agentrl.types import Example, StopReason, Trajectory


class Talk(AgentExecutor):
    async def execute(self, example: Example, llm: LLM) -> Trajectory:
        """Run one episode on tokens; `tokens` are sampled and answered with in each turn."""
        context = [3] * example["prompt"]
        for _ in range(example["turns"]):
            result = await llm.generate(context, max_new_tokens=example["tokens"], logprobs=True)
            context += result.token_ids.tolist() + [5] * example["tokens"]
        return Trajectory((), 1.0, StopReason.DONE)
