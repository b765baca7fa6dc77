"""The task of `vs_trl.py` as an agent of agentrl."""

import vs_trl_task as task

import agentrl as rl

examples = task.examples


class WriteDigits(rl.AgentExecutor):
    """One turn of exactly `RESPONSE` tokens after the bare prompt."""

    async def execute(self, example, llm):
        conversation = llm.conversation(rl.Observation(example["prompt"], raw=True))
        assert len(conversation.token_ids) == task.PROMPT
        answer = await llm.generate(conversation.token_ids, min_new_tokens=task.RESPONSE)
        action = conversation.take(answer)
        return llm.trajectory(conversation, reward=task.score(action.text))
