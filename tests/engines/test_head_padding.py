"""Heads that are padded for vLLM compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agentrl.engines.head_padding import HeadPadding, head_padding
from agentrl.errors import UsageError

SMALL = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "initializer_range": 0.5,
}


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "padded"), [(16, 3, 32), (8, 1, 32), (10, 1, 80)]
)
def test_a_padded_model_gives_the_same_logits(
    head_dim: int, num_kv_heads: int, padded: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {"head_dim": head_dim, "num_key_value_heads": num_kv_heads, "attention_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**SMALL, **sizes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "model")
    padding = head_padding(model.config)
    assert padding == HeadPadding(head_dim, padded)
    folder = padding.folder(tmp_path / "model", tmp_path / "padded")
    served = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert served.config.head_dim == padded
    ids = torch.randint(0, 50, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(served(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_head_is_spread_so_that_every_pair_turns_by_its_own_angle() -> None:
    # Pairs (0, 2) and (1, 3) of 4 become (0, 4) and (2, 6) of 8; queries grow by sqrt(2).
    padding = HeadPadding(4, 8)
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    weights = {f"model.layers.0.self_attn.{name}_proj.weight": rows for name in "qkv"}
    padded = {name[-13]: tensor for name, tensor in padding.weights(weights.items())}
    assert padded["k"][:, 0].tolist() == [1, 0, 2, 0, 3, 0, 4, 0]
    assert padded["v"][:, 0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    torch.testing.assert_close(padded["q"], padded["k"] * 2**0.5)


def test_sizes_with_kernels_are_left_alone_and_others_refused() -> None:
    assert head_padding(LlamaConfig(**SMALL, head_dim=64)) is None
    with pytest.raises(UsageError, match="heads of 48, only for those of 32, 64"):
        head_padding(
            LlamaConfig(
                **SMALL,
                head_dim=48,
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            )
        )
    with pytest.raises(UsageError, match="heads of 100"):
        head_padding(LlamaConfig(**SMALL, head_dim=100))
