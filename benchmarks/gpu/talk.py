"""The agent of `rollout.py`: one episode of the workload, on tokens."""

from __future__ import annotations

from episodes import Workload

from agentrl import AgentExecutor
from agentrl.executors.llm import LLM
from agentrl.types import Example, StopReason, Trajectory


class Talk(AgentExecutor):
    """Samples the turns, and counts what the prefix cache gave and could have given."""

    async def execute(self, example: Example, llm: LLM) -> Trajectory:
        """Run one episode."""
        workload = Workload(**example["workload"])
        context = workload.prompt_ids(example["group"], example["seed"])
        cached = possible = computed = 0
        for feedback in workload.feedback_ids(example["group"], example["member"]):
            result = await llm.generate(context, ignore_eos=True, logprobs=example["logprobs"])
            cached += result.cached_tokens if computed else 0
            possible += computed
            context = context + result.token_ids.tolist()
            computed = len(context) - 1  # the last sampled token was never an input
            context = context + feedback
        metrics = {"cached": float(cached), "possible": float(possible)}
        return Trajectory((), 1.0, StopReason.DONE, metrics=metrics)
