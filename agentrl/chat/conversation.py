"""One episode's context: messages and the exact token ids, side by side.

What the policy sampled stays as it was sampled. What the environment says is rendered and tokenized
once, when it is appended. Outside the sampled spans the ids are those of the chat template's
rendering of the messages, the end-of-turn token of a turn that was cut and the separators after it
included; those carry no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.chat.adapt import in_call_order, messages_of
from agentrl.chat.record import TokenRecord
from agentrl.chat.template import Schemas
from agentrl.errors import AgentError
from agentrl.types import Action, Generation, Message, Observation, Sequence

if TYPE_CHECKING:
    from agentrl.chat.format import ChatFormat

__all__ = ["Conversation"]


@dataclass(frozen=True, slots=True)
class _Extension:
    """What an observation does to the context: keep `keep` tokens, then append `token_ids`.

    `messages` are all those since the last sampled turn. `rendered` is the template's rendering of
    the whole history, where it is followed; with `fork` it rewrote what came before, and the
    context begins anew.
    """

    observation: Observation
    messages: list[Message]
    keep: int
    token_ids: list[int]
    rendered: str = ""
    fork: bool = False


class Conversation:
    """A context that grows by observations and sampled turns.

    Args:
        chat: the format of messages.
        follow_template: render the whole history at each observation and, where the template
            rewrites it, go on in a new sequence; otherwise the history is only appended to.

    Attributes:
        messages: the messages so far, as the template renders them.
        tools: the schemas that the template was given.
    """

    def __init__(self, chat: ChatFormat, *, follow_template: bool = False) -> None:
        self._chat = chat
        self._follow_template = follow_template
        self.messages: list[Message] = []
        self.tools: Schemas = ()
        self._record = TokenRecord()
        self._finished: list[Sequence] = []
        self._num_turns = 0
        self._call_ids: list[str] = []
        # The messages since the last sampled turn, which render as one piece from this token on.
        self._pending: list[Message] = []
        self._pending_start = 0
        # Whether the last turn still lacks its end-of-turn token, and which one it has.
        self._turn_open = False
        self._ended_by: int | None = None
        self._begun = False
        # Where the template is followed: its rendering of the context, and what of it a next
        # rendering must begin with to have rewritten nothing.
        self._rendered = ""
        self._unchanged = ""
        self._extension: _Extension | None = None

    def __len__(self) -> int:
        """Tokens of the context now."""
        return len(self._record)

    @property
    def token_ids(self) -> list[int]:
        """The context to sample from. A copy."""
        return list(self._record.token_ids)

    @property
    def num_turns(self) -> int:
        """How many turns were sampled."""
        return self._num_turns

    def length_with(self, observation: Observation) -> int:
        """Tokens that the context would hold with `observation` appended.

        The work is kept: appending the same observation next does not tokenize it again.
        """
        extension = self._extend(observation)
        return extension.keep + len(extension.token_ids)

    def append(self, observation: Observation) -> None:
        """Take what the environment says; the first observation begins the conversation.

        Results of tools are put in the order of the calls. Messages appended one after another
        without a sampled turn between them render together.

        Raises:
            AgentError: the observation holds no messages, or the template refuses them.
        """
        extension = self._extend(observation)
        self._extension = None
        if not self._begun:
            self.tools = self._chat.template_tools(observation.tools)
            self._begun = True
        if extension.fork:
            self._finish_sequence()
        self._rendered = extension.rendered
        self._record.truncate(extension.keep)
        self._record.extend(extension.token_ids)
        del self.messages[len(self.messages) - len(self._pending) :]
        self.messages += extension.messages
        if observation.raw:
            self._pending, self._pending_start = [], len(self._record)
            self._follow_template = self._turn_open = False
            self._ended_by = None
        else:
            self._pending = extension.messages

    def take(self, generation: Generation) -> Action:
        """Take one sampled turn.

        Returns:
            The turn's exact ids, its text without the end-of-turn token, and its tool calls.
        """
        token_ids = generation.token_ids.tolist()
        ended = bool(token_ids) and token_ids[-1] in self._chat.end_token_ids
        text = self._chat.decode(token_ids[:-1] if ended else token_ids)
        calls = self._chat.parse_tool_calls(text, id_prefix=f"call_{self._num_turns}_")
        action = Action(
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=generation.finish_reason,
            turn_index=self._num_turns,
            tool_calls=calls,
        )
        self._record.sample(generation)
        self.messages.append({"role": "assistant", "content": self._chat.thinking_prefix + text})
        if self._follow_template:
            self._unchanged = self._rendered + text
        self._num_turns += 1
        self._call_ids = [call.id for call in calls]
        self._turn_open = not ended
        self._ended_by = token_ids[-1] if ended else None
        self._pending, self._pending_start = [], len(self._record)
        self._extension = None
        return action

    def set_reward(self, reward: float | None) -> None:
        """Give the last sampled turn its reward."""
        self._record.set_reward(reward)

    def sequences(self) -> tuple[Sequence, ...]:
        """What to train on: one sequence, or one more for each time the history was rewritten."""
        current = self._record.sequence()
        return tuple(self._finished) if current is None else (*self._finished, current)

    def _extend(self, observation: Observation) -> _Extension:
        if self._extension is None or self._extension.observation is not observation:
            self._extension = self._plan(observation)
        return self._extension

    def _plan(self, observation: Observation) -> _Extension:
        if not self._begun:
            return self._plan_prompt(observation)
        if observation.tools:
            raise AgentError("an observation after the first offers tools: return them from reset")
        if observation.raw:
            message: Message = {"role": "environment", "content": observation.content}
            token_ids = self._chat.encode(str(observation.content))
            messages = [*self._pending, message]
            return _Extension(observation, messages, len(self), token_ids)
        new = self._chat.adapt(in_call_order(messages_of(observation), self._call_ids))
        return self._plan_messages(observation, [*self._pending, *new])

    def _plan_prompt(self, observation: Observation) -> _Extension:
        if observation.raw:
            text = str(observation.content)
            message: Message = {"role": "environment", "content": text}
            return _Extension(observation, [message], 0, self._chat.encode(text))
        messages = self._chat.prompt_messages(messages_of(observation), observation.tools)
        tools = self._chat.template_tools(observation.tools)
        rendered = self._chat.render(messages, tools)
        if messages[0]["role"] == "system" and not self._chat.traits.system:
            raise AgentError(
                "the chat template leaves out system messages: put the text into the first user "
                "message, or give another template with --model.chat_template"
            )
        return _Extension(observation, messages, 0, self._chat.encode(rendered), rendered)

    def _plan_messages(self, observation: Observation, messages: list[Message]) -> _Extension:
        history = self.messages[: len(self.messages) - len(self._pending)]
        if not history:
            rendered = self._chat.render(messages, self.tools)
            return _Extension(observation, messages, 0, self._chat.encode(rendered), rendered)
        turn = self._chat.turn_text(messages, self.tools)
        rendered = ""
        if self._follow_template:
            rendered = self._chat.render([*history, *messages], self.tools)
            if rendered != self._unchanged + turn:
                whole = self._chat.encode(rendered)
                return _Extension(observation, messages, 0, whole, rendered, fork=True)
        token_ids = self._chat.turn_ids(turn, turn_open=self._turn_open, ended_by=self._ended_by)
        return _Extension(observation, messages, self._pending_start, token_ids, rendered)

    def _finish_sequence(self) -> None:
        sequence = self._record.sequence()
        if sequence is not None:
            self._finished.append(sequence)
        self._record = TokenRecord()
        # Until the next sampled turn, every rendering is of the new sequence's prompt.
        self._unchanged, self._pending_start = "", 0
