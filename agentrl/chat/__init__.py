"""Messages to tokens, incrementally and exactly.

`ChatFormat` knows how a model talks; it makes one `Conversation` per context. Nothing here imports
torch or transformers: the tokenizer is given.
"""

from agentrl.chat.conversation import Conversation
from agentrl.chat.format import ChatFormat
from agentrl.chat.tools import split_calls, split_thinking

__all__ = ["ChatFormat", "Conversation", "split_calls", "split_thinking"]
