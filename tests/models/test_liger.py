"""Fused layers; what they compute is tested on a GPU, in `tests/train/test_trie_gpu.py`."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.errors import UsageError
from agentrl.models.liger import use_liger_kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_setting_is_refused_by_name():
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=10)
    with pytest.raises(UsageError, match=r"model\.use_liger_kernel is set, but .* need a GPU"):
        use_liger_kernels(LlamaForCausalLM(config))
