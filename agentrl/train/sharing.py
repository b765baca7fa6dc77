"""How the sequences of a batch go through a model together.

`trie`: each distinct prefix once. It may be where attention is all that tokens have to do with each
other, and where a token attends to every token before it. `packed`: several sequences in a row,
where their positions, which begin again with each, keep them apart: masks of transformers are made
from them, but the state of linear attention runs on. `padded`: each in a row of its own.

The configuration says what cannot be tried on a few tokens (windows, rotary scaling by length);
then a small tree, or a packed row, is compared with separate sequences. How much rounding alone may
change is seen from the same sequences computed side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config import Config
from agentrl.errors import UsageError
from agentrl.train.batch import Sample
from agentrl.train.tree_attention import TREE_ATTENTION, TreePlan, UnsupportedAttentionError
from agentrl.train.trie import TokenTrie

__all__ = ["Sharing", "choose_sharing", "why_not", "why_not_packed"]

Sharing: TypeAlias = Literal["trie", "packed", "padded"]

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SMALLEST_HEADS = 16
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_MASKED_ATTENTION = ("sdpa", "eager")
"""What transformers makes a mask for that keeps the sequences of a row apart."""
_PROBE = ([1, 2, 3, 4], [1, 2, 4, 3, 1], [1, 2, 4, 1, 2], [2, 1, 3])
"""Sequences that fork twice, and one that shares nothing."""

_SEEN_TOO_MUCH = 0.15
"""A token that sees what it must not changes all states by two to three times this share."""

_log = logging.getLogger(__name__)


def choose_sharing(policy: PreTrainedModel, config: Config) -> Sharing:
    """Decide it for a run as `train.prefix_sharing` says; the log names what stands in the way.

    Call it while the weights are whole.

    Raises:
        UsageError: the model cannot do what was asked for, or an episode would not fit a pass.
    """
    choice = config.train.prefix_sharing
    if choice == "padded":
        return "padded"
    if choice != "packed":
        if config.model.attn_implementation != "sdpa":
            reason: str | None = f"model.attn_implementation is {config.model.attn_implementation}"
        else:
            reason = why_not(policy, config.rollout.max_tokens)
        if reason is None:
            return "trie"
        _refuse_if_asked(config, "trie", reason)
        _check_length(config, reason)
        _log.info("Shared prefixes are computed once for each sequence, since %s.", reason)
    reason = why_not_packed(policy, config.rollout.max_tokens)
    if reason is None:
        _log.info("Sequences are packed into rows.")
        return "packed"
    _refuse_if_asked(config, "packed", reason)
    _log.info("Each sequence has a row of its own, since %s.", reason)
    return "padded"


def _refuse_if_asked(config: Config, sharing: Sharing, reason: str) -> None:
    if config.train.prefix_sharing == sharing:
        raise UsageError(
            f"train.prefix_sharing is {sharing}, but {reason}: set train.prefix_sharing auto."
        )


def _check_length(config: Config, reason: str) -> None:
    limit = config.train.max_tokens_per_gpu
    if config.rollout.max_tokens > limit:
        raise UsageError(
            f"An episode of rollout.max_tokens ({config.rollout.max_tokens}) does not fit a pass "
            f"of train.max_tokens_per_gpu ({limit}), and cannot be cut, since {reason}: raise "
            "train.max_tokens_per_gpu, or lower rollout.max_tokens."
        )


def why_not(policy: PreTrainedModel, longest: int) -> str | None:
    """What keeps `policy` from sharing prefixes of sequences of up to `longest` tokens, if any."""
    config = policy.config.get_text_config()
    kind = f"a model of type {policy.config.model_type}"
    foreign = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if foreign:
        return f"{kind} has layers of type {', '.join(sorted(foreign))}"
    if not getattr(policy, "_supports_attention_backend", False):
        return f"{kind} does not let its attention be replaced"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{kind} caps its attention scores"
    window = _window(config)
    if window is not None and window < longest:
        return f"{kind} has a sliding window of {window} tokens, less than rollout.max_tokens"
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if torch.cuda.is_available() and heads < _SMALLEST_HEADS:
        return f"{kind} has heads of {heads}, for which FlexAttention has no GPU kernel"
    return _length_dependence(config, kind, longest) or _try_tree(policy, kind)


def why_not_packed(policy: PreTrainedModel, longest: int) -> str | None:
    """What keeps sequences of up to `longest` tokens from standing in one row, if anything."""
    config = policy.config.get_text_config()
    kind = f"a model of type {policy.config.model_type}"
    if policy.config._attn_implementation not in _MASKED_ATTENTION:
        return f"model.attn_implementation is {policy.config._attn_implementation}"
    return _length_dependence(config, kind, longest) or _try_row(policy, kind)


def _length_dependence(config: Any, kind: str, longest: int) -> str | None:
    limit = getattr(config, "max_position_embeddings", None) or longest
    for rope in _rope_parameters(config):
        original = rope.get("original_max_position_embeddings") or limit
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE and longest > original:
            return f"{kind} scales its positions by the length of the sequence"
    return None


def _window(config: Any) -> int | None:
    """The sliding window, if any layer uses it."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return window if getattr(config, "use_sliding_window", True) else None
    return window if "sliding_attention" in layer_types else None


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary settings: one dictionary, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))


@torch.no_grad()
def _try_tree(policy: PreTrainedModel, kind: str) -> str | None:
    """Compare the hidden states of a small tree with those of its sequences."""
    device = next(policy.parameters()).device
    samples = [
        Sample(np.array([*ids, 0], np.int32), np.arange(1, len(ids) + 1, dtype=np.int32))
        for ids in _PROBE
    ]
    trie = TokenTrie.build(samples)
    ids_1T = torch.from_numpy(trie.token_ids).to(device).unsqueeze(0)
    expected, limit = _expected(policy)
    own = policy.config._attn_implementation
    policy.set_attn_implementation(TREE_ATTENTION)
    plan = TreePlan(trie.positions, trie.subtree_end, device)
    try:
        tree = _hidden(policy, ids_1T, position_ids=plan.positions_1T, agentrl_tree=plan)
    except UnsupportedAttentionError as error:
        return f"{kind} cannot attend over a tree ({error})"
    finally:
        policy.set_attn_implementation(own)
    if _deviation(tree[torch.from_numpy(trie.index).to(device)], expected) <= limit:
        return None
    return f"{kind} gives a token other states in a tree than in a row"


@torch.no_grad()
def _try_row(policy: PreTrainedModel, kind: str) -> str | None:
    """Compare the hidden states of a packed row with those of its sequences."""
    device = next(policy.parameters()).device
    ids_1T = torch.tensor([[token for ids in _PROBE for token in ids]], device=device)
    places = [place for ids in _PROBE for place in range(len(ids))]
    positions_1T = torch.tensor([places], device=device)
    expected, limit = _expected(policy)
    if _deviation(_hidden(policy, ids_1T, position_ids=positions_1T), expected) <= limit:
        return None
    return f"{kind} lets sequences in one row see each other"


def _expected(policy: PreTrainedModel) -> tuple[Tensor, float]:
    """The hidden states of the probe's sequences, one after the other, and how far others may be
    from them for rounding's sake."""
    device = next(policy.parameters()).device
    states = torch.cat([_hidden(policy, torch.tensor([ids], device=device)) for ids in _PROBE])
    width = max(len(ids) for ids in _PROBE)
    padded = [[*ids, *[0] * (width - len(ids))] for ids in _PROBE]
    side_by_side = policy.base_model(
        input_ids=torch.tensor(padded, device=device), use_cache=False
    )[0]
    ends = [row[: len(ids)] for row, ids in zip(side_by_side, _PROBE, strict=True)]
    usual = 3e-2 if states.dtype == torch.bfloat16 else 1e-3
    limit = max(usual, 3 * _deviation(torch.cat(ends), states))
    return states, min(limit, _SEEN_TOO_MUCH)


def _deviation(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _hidden(policy: PreTrainedModel, ids_1T: Tensor, **arguments: Any) -> Tensor:
    hidden: Tensor = policy.base_model(input_ids=ids_1T, use_cache=False, **arguments)[0]
    return hidden[0]
