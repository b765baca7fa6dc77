"""OpenRLHF's `agent_func.py` files, with only their import line changed.

    from agentrl.executors.openrlhf import AgentInstanceBase, MultiTurnAgentExecutor

There an environment deals in text: `reset(states)` gets the rendered prompt, `step(states)` the
text so far and what the policy added, end-of-turn tokens included, and answers with feedback that
goes into the context as it is. The contract is that of OpenRLHF's `openrlhf/utils/agent.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.chat import Conversation
from agentrl.config import DataConfig, RolloutConfig
from agentrl.errors import AgentError, UsageError
from agentrl.executors.base import AgentInstance
from agentrl.executors.multi_turn import Episode, MultiTurnExecutor
from agentrl.executors.normalize import as_step_result
from agentrl.executors.openrlhf_loop import AgentExecutorBase
from agentrl.executors.openrlhf_row import label_of, prompt_of
from agentrl.executors.openrlhf_sampling import from_vllm_names, to_vllm_names
from agentrl.types import Action, Observation, StepResult

__all__ = ["AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor"]

_STEP_KEYS = ("rewards", "scores", "environment_feedback", "done", "sampling_params", "extra_logs")


class AgentInstanceBase(AgentInstance):
    """Base of an OpenRLHF environment; its `__init__` may be `async def`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is passed."""

    async def reset(self, example: dict[str, Any], **kwargs: Any) -> Any:
        """The first observation; by default the prompt as it is."""
        return example


class MultiTurnAgentExecutor(MultiTurnExecutor):
    """Runs OpenRLHF environments.

    The row's field `data.prompt_key` may hold text, which is taken as it is, or messages, which the
    chat template renders. A row without `data.label_key` has the label None.
    """

    needs_prompt = True

    def __init__(self, agent_instance_cls: type[AgentInstance]) -> None:
        if not issubclass(agent_instance_cls, AgentInstanceBase):
            raise UsageError(
                f"{agent_instance_cls.__name__} must extend "
                "agentrl.executors.openrlhf.AgentInstanceBase"
            )
        super().__init__(agent_instance_cls, RolloutConfig())
        self._data = DataConfig()

    def configure(self, rollout: RolloutConfig, data: DataConfig) -> None:
        """Take the run's limits, and the names of the row's fields."""
        super().configure(rollout, data)
        self._data = data

    async def reset(self, episode: Episode) -> Observation:
        """The first observation, as raw text."""
        prompt = prompt_of(episode.example, self._data, episode.llm.format)
        label = label_of(episode.example, self._data)
        # The prompt has two names: older files read the first, newer ones the second.
        states = {"prompt": prompt, "observation": prompt, "label": label}
        value = await episode.instance.reset(states)
        if isinstance(value, Mapping):
            value = value.get("observation")
        if not isinstance(value, str):
            raise AgentError(
                f"{self.instance_class.__name__}.reset returned no text: return a dict whose "
                "'observation' is a str"
            )
        return Observation(value, raw=True)

    async def step(
        self, episode: Episode, conversation: Conversation, action: Action
    ) -> StepResult:
        """Give the environment the texts, and read the dict that it returns."""
        chat, token_ids = episode.llm.format, conversation.token_ids
        states = {
            "observation_text": chat.decode(token_ids[: len(token_ids) - len(action.token_ids)]),
            "action_text": chat.decode(action.token_ids),
            "label": label_of(episode.example, self._data),
            "sampling_params": to_vllm_names(episode.llm.sampling, episode.sampling),
        }
        value = await episode.instance.step(states)
        if not isinstance(value, Mapping):
            raise AgentError(
                f"{self.instance_class.__name__}.step returned a {type(value).__name__}: return a "
                f"dict with the keys {', '.join(_STEP_KEYS)}"
            )
        # OpenRLHF leaves other keys unread, and files carry some.
        known = {key: value[key] for key in _STEP_KEYS if key in value}
        if known.get("sampling_params") is not None:
            known["sampling_params"] = from_vllm_names(known["sampling_params"])
        return as_step_result(known)
