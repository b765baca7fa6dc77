"""The task of `vs_trl.py` and `gpu/vs_trl.py` as an agent of agentrl."""

import vs_trl_task

import agentrl as rl

TASK = vs_trl_task.current
examples = TASK.examples


class WriteTokens(rl.AgentExecutor):
    """One turn of exactly `Workload.response` tokens after the bare prompt."""

    async def execute(self, example, llm):
        conversation = llm.conversation(rl.Observation(example["prompt"], raw=True))
        assert len(conversation.token_ids) == TASK.workload.prompt
        answer = await llm.generate(conversation.token_ids, min_new_tokens=TASK.workload.response)
        action = conversation.take(answer)
        reward = TASK.score(action.text, action.token_ids)
        return llm.trajectory(conversation, reward=reward)
