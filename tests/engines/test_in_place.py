"""Real servers whose layers keep their weights as they are loaded, as on a GPU, copy updates.

On a CPU vLLM packs its layers. A second plugin in its process leaves that out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engines.conftest import REAL_KINDS, server_config
from engines.tiny import VOCAB_SIZE, build_model, greedy, logprobs_R, save_model, source_of
from transformers import PreTrainedModel

from agentrl.engines.factory import make_engine
from agentrl.types import SamplingParams

pytestmark = pytest.mark.engine

UNPACKED = """
import torch
from vllm.model_executor.layers import utils


def register():
    def leave(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = leave
"""
PROMPT = list(range(3, 60))


def install_unpacked(folder: Path) -> Path:
    metadata = folder / "unpacked-0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "unpacked.py").write_text(UNPACKED)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: unpacked\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nunpacked = unpacked:register\n"
    )
    return folder


def build(seed: int, tied: bool) -> PreTrainedModel:
    """A vocabulary that vLLM fills up to a multiple of 64."""
    return build_model(
        seed, vocab_size=VOCAB_SIZE - 20, tie_word_embeddings=tied, attention_bias=True
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", REAL_KINDS)
async def test_updates_are_copied_from_the_third_on_and_are_whole(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    models = [build(seed, tied) for seed in range(2)]
    folder = save_model(models[0], tmp_path / "model")
    config = server_config(kind, transport="ipc")
    if kind == "vllm":
        config.engine.env["PYTHONPATH"] = str(install_unpacked(tmp_path / "unpacked"))
    engine = make_engine(config, run_dir=tmp_path, model_folder=folder, module=models[0])
    await engine.start()
    try:
        for version, index in enumerate((1, 0, 1, 0), start=1):
            await engine.update_weights(source_of(models[index], version))
            result = await engine.generate(PROMPT, SamplingParams(12, temperature=0))
            ids = result.token_ids.tolist()
            assert ids == greedy(models[index], PROMPT, 12)
            assert result.logprobs is not None
            expected = logprobs_R(models[index], PROMPT, ids)
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    finally:
        await engine.close()
    (log,) = (tmp_path / "engines").glob(f"{kind}-*.log")
    assert "weights are copied in place from now on" in log.read_text()
