import string

import torch

from agentrl.models.tiny import build_tiny, build_tiny_tokenizer

MESSAGES = [
    {"role": "user", "content": "a user\nguesses: 42~"},
    {"role": "assistant", "content": "ok"},
]


def test_every_printable_ascii_character_and_newline_is_one_token_and_decodes_to_itself():
    tokenizer = build_tiny_tokenizer()
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text) == 96
    assert tokenizer.decode(ids) == text


def test_a_character_outside_the_alphabet_becomes_the_unknown_token():
    tokenizer = build_tiny_tokenizer()
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_the_chat_template_renders_chatml_with_three_tokens_of_header():
    tokenizer = build_tiny_tokenizer()
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\na user\nguesses: 42~<|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>assistant\n"
    )
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    assert len(header) == 3
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    one, _ = build_tiny(3)
    two, _ = build_tiny(3)
    other, _ = build_tiny(4)
    assert torch.equal(before, torch.get_rng_state())
    pairs = list(zip(one.parameters(), two.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_the_model_is_small_and_knows_where_a_turn_ends():
    model, tokenizer = build_tiny(0)
    assert 100_000 <= sum(p.numel() for p in model.parameters()) <= 200_000
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_letters_of_a_role_name_outside_a_header_survive_a_round_trip():
    tokenizer = build_tiny_tokenizer()
    for text in ("users", "tooluser", string.ascii_letters):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
