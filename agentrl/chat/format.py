"""How a tokenizer's model talks: its template, its end-of-turn tokens, its tool calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from typing import Any, Literal

from agentrl.chat.adapt import adapt_messages, add_to_system, describe_tools
from agentrl.chat.conversation import Conversation
from agentrl.chat.stability import find_rewrites
from agentrl.chat.template import ChatTemplate, Schemas
from agentrl.chat.tools import (
    ParserName,
    parse_tool_calls,
    resolve_parser,
    split_calls,
    split_thinking,
)
from agentrl.chat.traits import probe_traits
from agentrl.chat.turns import TurnRenderer
from agentrl.errors import UsageError
from agentrl.types import Action, Message, Observation, ToolCall

__all__ = ["ChatFormat"]

logger = logging.getLogger(__name__)


class ChatFormat:
    """Made once per run and shared by all episodes; it makes their `Conversation`s.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        history: `keep` only ever appends; `template` follows a template that rewrites history,
            into a new sequence each time.
        tool_parser: how the model writes tool calls (see `agentrl.chat.tools`).
        generation_eos: end-of-turn ids of the model's generation config.

    Attributes:
        end_token_ids: the ids that end a turn: the tokenizer's, the generation config's, and the
            one that the template writes. Engines stop on all of them.
        tokenizer: as it was given.
        rewrites: the kinds of dialogue whose history the template rewrites.
        traits: what the template can render.

    Raises:
        UsageError: no chat template, one that cannot hold sampled tokens, an unknown parser, or
            no token that ends a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        history: Literal["keep", "template"] = "keep",
        tool_parser: str = "auto",
        generation_eos: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self.traits = probe_traits(self._template)
        parser = resolve_parser(
            tool_parser, self._template.source, template_renders_tools=self.traits.tools
        )
        self._turns = TurnRenderer(self._template, self.traits.end_token_id)
        known = {self._template.eos_token_id, self.traits.end_token_id, *generation_eos}
        self.end_token_ids = frozenset(token_id for token_id in known if token_id is not None)
        if not self.end_token_ids:
            raise UsageError(
                "no token ends a turn: neither the tokenizer nor the chat template names one; "
                "set eos_token in the tokenizer's configuration"
            )
        self._warned: set[str] = set()
        # Probing the template needs no parser, and must not ask for one.
        self.parser: ParserName = "none"
        self.rewrites = find_rewrites(self)
        self.parser = parser
        self._follow_template = history == "template" and bool(self.rewrites)
        if self.rewrites and not self._follow_template:
            self._warn(
                f"the chat template rewrites history ({', '.join(self.rewrites)}); the sampled "
                "tokens stay as they are: set rollout.history to template to follow the template"
            )

    @property
    def thinking_prefix(self) -> str:
        """What the generation prompt writes of the thinking already; often empty."""
        return self.traits.thinking_prefix

    def conversation(self, observation: Observation | None = None) -> Conversation:
        """A new conversation, begun with `observation` if there is one."""
        conversation = Conversation(self, follow_template=self._follow_template)
        if observation is not None:
            conversation.append(observation)
        return conversation

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none added."""
        return self._template.encode(text)

    def decode(self, token_ids: SequenceABC[int]) -> str:
        """Text of `token_ids`, special tokens included."""
        return self._template.decode(token_ids)

    def render(self, messages: SequenceABC[Message], tools: Schemas = ()) -> str:
        """The text of a prompt: `messages` and the generation prompt.

        Raises:
            AgentError: the template refuses them.
        """
        return self._template.render(messages, tools, generation_prompt=True)

    def prompt_ids(self, messages: SequenceABC[Message], tools: Schemas = ()) -> list[int]:
        """Ids of a prompt: `messages` and the generation prompt."""
        return self.encode(self.render(messages, tools))

    def turn_text(self, messages: SequenceABC[Message], tools: Schemas = ()) -> str:
        """The text from the end of an assistant's content to the next generation prompt.

        Raises:
            AgentError: the template refuses `messages` after an assistant turn.
        """
        return self._turns.text(messages, tools)

    def turn_ids(
        self, turn_text: str, *, turn_open: bool, ended_by: int | None = None
    ) -> list[int]:
        """Ids of a `turn_text`; it is tokenized apart from what was sampled, so nothing merges.

        Args:
            turn_text: as `turn_text` gave it.
            turn_open: the assistant's turn lacks its end-of-turn token, which is then the first
                part.
            ended_by: the end-of-turn token that was sampled.
        """
        token_ids = self.encode(turn_text)
        if turn_open:
            return token_ids
        if self.traits.end_token_id is None:
            # Where turns end without a token of their own, a model may end its turn with the mark
            # of the next role (GLM does), which then stands there already.
            return token_ids[1:] if token_ids[:1] == [ended_by] else token_ids
        return token_ids[token_ids.index(self.traits.end_token_id) + 1 :]

    def parse_tool_calls(self, text: str, *, id_prefix: str) -> tuple[ToolCall, ...]:
        """The calls in what a model wrote after the generation prompt."""
        return parse_tool_calls(self.thinking_prefix + text, self.parser, id_prefix=id_prefix)

    def assistant_message(self, action: Action) -> Message:
        """`action` as clients expect it: content, reasoning_content and tool_calls apart.

        A turn with a call that cannot be read keeps its text, and has no tool_calls.
        """
        thinking, visible = split_thinking(self.thinking_prefix + action.text)
        message: Message = {"role": "assistant", "content": visible}
        if thinking:
            message["reasoning_content"] = thinking.strip()
        if action.tool_calls and all(call.error is None for call in action.tool_calls):
            message["content"] = split_calls(visible, self.parser)[0]
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in action.tool_calls
            ]
        return message

    def template_tools(self, tools: Schemas) -> Schemas:
        """The part of `tools` that the template renders by itself: all or none."""
        return tools if self.traits.tools else ()

    def prompt_messages(self, messages: SequenceABC[Message], tools: Schemas) -> list[Message]:
        """The first messages, with `tools` described in them where the template ignores them.

        Raises:
            UsageError: no parser reads the calls that the tools invite.
        """
        adapted = self.adapt(messages)
        if not tools:
            return adapted
        if self.parser == "unknown" or (self.parser == "none" and not self.traits.tools):
            raise UsageError(
                "the agent offers tools, but it is not known how this model writes its calls: set "
                "rollout.tool_parser to hermes, llama3 or json"
            )
        if self.traits.tools:
            return adapted
        self._warn(
            "the chat template ignores tools: they are described in the system message instead"
        )
        description = describe_tools(tools, self.parser)
        return add_to_system(adapted, description, has_system=self.traits.system)

    def adapt(self, messages: SequenceABC[Message]) -> list[Message]:
        """`messages` with calls and results of tools as the template can render them."""
        if not self.traits.tool_role and any(message["role"] == "tool" for message in messages):
            self._warn(
                "the chat template has no form for the role tool: results of tools are given as "
                "user messages instead"
            )
        return adapt_messages(messages, self.traits)

    def _warn(self, message: str) -> None:
        """Log a warning, once per format."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)
