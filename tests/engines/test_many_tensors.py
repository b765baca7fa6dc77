"""A model of more than a thousand tensors arrives whole, in buckets of ten and of a thousand.

sglang#14178: many small buckets garbled the weights. Checksums of the engine's own tell.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engines.conftest import REAL_KINDS, server_config
from engines.tiny import EOS, VOCAB_SIZE, logprobs_R, save_model, source_of
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.engines.transport.base import WeightReceiver, WeightTransport
from agentrl.engines.transport.buckets import Bucket
from agentrl.engines.transport.disk import DiskTransport
from agentrl.engines.transport.group import GroupTransport
from agentrl.engines.transport.verified import VerifiedTransport
from agentrl.engines.weight_update import UpdateSettings, update_weights
from agentrl.types import SamplingParams

NUM_LAYERS = 112
"""Nine tensors each, beside embedding, last norm and head: 1,011."""
TEN = 33_100
"""Bytes of eight matrices of 32 x 32 in float32 and two norms: almost any ten tensors in a row."""
PROMPT = list(range(3, 60))


def build_deep_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


class Counted(WeightTransport):
    """A transport that remembers how many tensors each bucket held."""

    name = "counted"

    def __init__(self, inner: WeightTransport) -> None:
        self.inner = inner
        self.sizes: list[int] = []

    async def send(
        self, receivers: Sequence[WeightReceiver], buckets: AsyncIterator[Bucket], version: int
    ) -> None:
        async def counted() -> AsyncIterator[Bucket]:
            async for bucket in buckets:
                self.sizes.append(len(bucket.specs))
                yield bucket

        await self.inner.send(receivers, counted(), version)

    async def close(self) -> None:
        await self.inner.close()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL_KINDS)
async def test_checksums_are_right_for_buckets_of_ten_and_of_a_thousand_tensors(
    kind: str, tmp_path: Path
) -> None:
    models = [build_deep_model(seed) for seed in range(3)]
    folder = save_model(models[0], tmp_path / "model")
    pool = make_engine(server_config(kind), run_dir=tmp_path, model_folder=folder)
    assert isinstance(pool, EnginePool)
    try:
        await pool.start()
        for index, (bucket_bytes, tensors) in enumerate(((TEN, 10), (1 << 30, 1011)), start=1):
            settings = UpdateSettings(bucket_bytes=bucket_bytes)
            counted = Counted(GroupTransport("gloo"))
            # The second transfer fails unless its checksums are those of a load from disk.
            checked = VerifiedTransport(counted, DiskTransport(tmp_path / "weights"))
            for version, transport in ((2 * index, counted), (2 * index + 1, checked)):
                source = source_of(models[index], version)
                await update_weights(pool.engines, source, transport, settings)
                await assert_speaks_for(pool, models[index], version)
            await checked.close()
            assert sum(counted.sizes) == 2 * 1011
            assert statistics.median(counted.sizes) == tensors
    finally:
        await pool.close()


async def assert_speaks_for(pool: EnginePool, model: PreTrainedModel, version: int) -> None:
    result = await pool.generate(PROMPT, SamplingParams(8))
    assert result.logprobs is not None
    expected = logprobs_R(model, PROMPT, result.token_ids.tolist())
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-3)
    assert set(result.weight_versions.tolist()) == {version}
