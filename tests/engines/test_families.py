"""Rows that begin alike read their common prefix once, and sample what they would have alone."""

import asyncio

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from embedded_models import FAMILIES, build, prompt, response_logprobs, serving

from agentrl.engines.embedded import attention, families
from agentrl.engines.embedded.families import (
    Families,
    Family,
    attend_in_families,
    find_families,
)
from agentrl.types import SamplingParams


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families pay from the first shared token on."""
    monkeypatch.setattr(families, "CALL_TOKENS", 0)
    monkeypatch.setattr(families, "SHORT", 0)


def found(rows: list[list[int]]) -> list[tuple[list[int], int]]:
    tokens = np.zeros((len(rows), 12), dtype=np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = np.array([len(row) for row in rows])
    return [(each.rows.tolist(), each.prefix) for each in find_families(tokens, lengths)]


def test_rows_that_begin_alike_are_one_family_and_a_stranger_is_alone(always):
    rows = [[1, 2, 3, 4, 5], [7, 8, 9], [1, 2, 3, 4, 6, 6], [1, 2, 3, 9], [7, 8, 9, 1, 1]]
    assert found(rows) == [([0, 2, 3], 3), ([1, 4], 3)]
    assert found([[5, 5], [1, 2, 3], [1, 2, 3, 4]]) == [([1, 2], 3), ([0], 0)]


def test_a_row_that_would_halve_the_prefix_of_a_family_stays_out_of_it(always):
    assert found([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 9]]) == [([0, 1], 4), ([2], 0)]


def test_only_prefixes_that_save_more_than_the_calls_cost_make_families():
    tokens = np.zeros((3, 1030), dtype=np.int32)
    # Two rows save themselves 1,024 or 1,025 tokens each; the calls of a family cost 2,048.
    assert not find_families(tokens, np.array([1024, 1024, 1024]))
    assert find_families(tokens, np.array([1025, 1025, 1025]))


def test_each_row_attends_to_the_prefix_and_to_its_own_tokens_up_to_its_position():
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(5, 2, 9, 8, generator=generator) for _ in range(2))
    query = torch.randn(4, 2, 3, 8, generator=generator)
    slots, positions = np.array([0, 1, 3, 4]), np.array([5, 8, 4, 7])
    for slot in (3, 4):
        keys[slot, :, :4], values[slot, :, :4] = keys[1, :, :4], values[1, :, :4]
    parts = [Family(np.array([1, 2, 3]), 4), Family(np.array([0]), 0)]
    out = attend_in_families(
        query, keys, values, Families(parts, slots, positions, torch.float32), 0.3
    )
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        k, v = keys[slot, :, : position + 1], values[slot, :, : position + 1]
        expected = F.scaled_dot_product_attention(query[row], k, v, scale=0.3)
        torch.testing.assert_close(out[row], expected, atol=1e-6, rtol=0)


def test_families_whose_prefixes_end_close_together_are_computed_at_once_and_stay_apart():
    generator = torch.Generator().manual_seed(1)
    slots, positions = (
        np.array([0, 1, 2, 4, 5, 6, 9, 11]),
        np.array([44, 43, 50, 47, 41, 60, 59, 8]),
    )
    keys, values = (torch.randn(12, 2, 64, 8, generator=generator) for _ in range(2))
    parts = [
        Family(np.array([0, 1]), 40),
        Family(np.array([2, 4]), 38),
        Family(np.array([3, 5, 6]), 42),  # of another size
        Family(np.array([7]), 0),
    ]
    for family in parts:
        first, *others = slots[family.rows]
        for other in others:
            keys[other, :, : family.prefix] = keys[first, :, : family.prefix]
            values[other, :, : family.prefix] = values[first, :, : family.prefix]
    query = torch.randn(8, 2, 3, 8, generator=generator)
    together = Families(parts, slots, positions, torch.float32)
    assert [cohort.prefix for cohort in together.cohorts] == [0, 38]
    out = attend_in_families(query, keys, values, together, 0.3)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        k, v = keys[slot, :, : position + 1], values[slot, :, : position + 1]
        expected = F.scaled_dot_product_attention(query[row], k, v, scale=0.3)
        torch.testing.assert_close(out[row], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
async def test_siblings_sample_what_a_plain_forward_pass_says(
    family, always, monkeypatch: pytest.MonkeyPatch
):
    calls = 0

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return attend_in_families(*arguments)

    monkeypatch.setattr(attention, "attend_in_families", counted)
    plain = build(family)
    prompts = [[*prompt(40), *prompt(i, seed=i)] for i in range(1, 4)] + [prompt(25, seed=9)]
    async with serving(build(family)) as engine:
        outs = await asyncio.gather(
            *(engine.generate(ids, SamplingParams(12, seed=i)) for i, ids in enumerate(prompts))
        )
    for ids, out in zip(prompts, outs, strict=True):
        np.testing.assert_allclose(out.logprobs, response_logprobs(plain, ids, out), atol=1e-4)
    # Layers with a window see other keys, and are left as they were.
    assert calls > 0
