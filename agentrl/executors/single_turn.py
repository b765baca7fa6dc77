"""Agents of one turn: a prompt from the data, an answer, a reward."""

from __future__ import annotations

from typing import Any, ClassVar

from agentrl.errors import AgentError
from agentrl.executors.base import AgentInstance
from agentrl.types import Action, Example, StepResult

__all__ = ["SingleTurnAgent"]


class SingleTurnAgent(AgentInstance):
    """Subclass it and write `reward`. Like every instance it lives for one episode.

    Every row must have the field `data.prompt_key`, unless the class has a `reset` of its own.
    """

    prompt_key: str = "prompt"
    """The field of the example that holds the prompt, a str or a list of messages. A class that
    names one means that one; otherwise a run puts `data.prompt_key` here."""

    needs_prompt: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "reset" in cls.__dict__ and "needs_prompt" not in cls.__dict__:
            cls.needs_prompt = False

    def reward(self, example: Example, completion: str) -> Any:
        """The reward of `completion`, a number, or None where it cannot be scored."""
        raise NotImplementedError(f"{type(self).__name__} must define reward(example, completion)")

    def reset(self, example: Example) -> Any:
        """The prompt."""
        self._example = example
        if self.prompt_key not in example:
            raise AgentError(
                f"the example has the fields {', '.join(map(repr, example))} and not "
                f"{self.prompt_key!r}: set data.prompt_key, or prompt_key in {type(self).__name__}"
            )
        return example[self.prompt_key]

    def step(self, action: Action) -> StepResult:
        """Score the answer, which ends the episode."""
        return StepResult(reward=self.reward(self._example, action.text), done=True)
