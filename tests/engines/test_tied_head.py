"""A head that is the embedding, under another name, is that of the newest weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engines.conftest import REAL, server_config
from engines.tiny import build_model, logprobs_R, save_model, source_of

from agentrl.engines.factory import make_engine
from agentrl.types import SamplingParams

PROMPT = list(range(3, 60))


@pytest.mark.parametrize("transport", ["gloo", "ipc", "disk"])
@pytest.mark.parametrize("kind", REAL)
async def test_a_tied_head_comes_with_every_update(
    kind: str, transport: str, tmp_path: Path
) -> None:
    models = [build_model(seed, tie_word_embeddings=True) for seed in range(4)]
    config = server_config(kind, transport=transport)
    engine = make_engine(
        config, run_dir=tmp_path, model_folder=save_model(models[0], tmp_path / "model")
    )
    try:
        await engine.start()
        for version, model in enumerate(models):
            if version:
                await engine.update_weights(source_of(model, version))
            said = await engine.generate(PROMPT, SamplingParams(12))
            assert said.logprobs is not None
            expected = logprobs_R(model, PROMPT, said.token_ids.tolist())
            np.testing.assert_allclose(said.logprobs, expected, atol=1e-4)
    finally:
        await engine.close()
