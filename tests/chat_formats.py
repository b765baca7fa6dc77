"""Small real tokenizers with the chat templates of several model families, written for the tests.

The tokenizers are byte-level BPE trained on a few sentences, with added special tokens as the real
ones have, so that merges across a boundary happen where they would happen in earnest.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentrl.types import Generation

# Words, numbers, punctuation with the line breaks after it, line breaks, blanks.
WORDS = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

CORPUS = [
    "The number is higher than your guess.\n\nThe number is lower than your guess.\n",
    "<think>\nI should call the tool.\n</think>\n\nThe answer is 42.",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "<tool_response>\n3\n</tool_response>",
    *["Lines that end in an empty one.\n\n", "And three.\n\n\n"] * 3,
    "user assistant system tool ipython environment",
]

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

SMOLLM = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{%- set role = 'ipython' if message['role'] == 'tool' else message['role'] %}
{%- if loop.first and tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nAnswer with {"name": ..., "parameters": ...}\
 to call one of:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|eot_id|>' }}
{%- endif %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- elif role == 'ipython' %}{{- message['content'] | tojson }}
{%- else %}{{- message['content'] | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

QWEN3 = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- 'Call with <tool_call>JSON</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# The generation prompt opens the thinking, and earlier thinking is dropped at once.
OPEN_THINKING = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1] + '<|im_end|>' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

# Strict about roles: a tool's result needs a structured call before it.
STRICT = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception('a result needs a call') }}
{%- endif %}
{{- '<|im_start|>result\\n' + message.content + '<|im_end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[CALL]' + (call.function.arguments | tojson) }}
{%- endfor %}{{- '<|im_end|>' }}
{%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>' }}
{%- else %}{{- raise_exception('unknown role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# No token ends a turn: turns are told apart by line breaks, which merge with each other.
LINES = """\
{%- for message in messages %}
{{- message['role'] + ': ' + message['content'] + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "smollm": SMOLLM,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "open_thinking": OPEN_THINKING,
    "strict": STRICT,
    "lines": LINES,
}

ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@cache
def _backend(special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer.to_str()


def make_tokenizer(family: str, **special_tokens: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the template of `family`; `eos_token=...` replaces its own."""
    if family == "llama3":
        special = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                   "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")  # fmt: skip
        tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    else:
        special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        tokens = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(special)), **(tokens | special_tokens)
    )
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer


def generation(
    token_ids: list[int], finish_reason: str = "stop", *, version: int = 0
) -> Generation:
    """What an engine would return for `token_ids`."""
    return Generation(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.full(len(token_ids), -0.5, dtype=np.float32),
        weight_versions=np.full(len(token_ids), version, dtype=np.int32),
        finish_reason=finish_reason,
    )
