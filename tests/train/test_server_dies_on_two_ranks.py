"""Two learner ranks and two servers, one of which is killed in the middle of an update.

Under torchrun this file is the ranks; what they found goes to the folder given as argument.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from learner_parts import make_config, random_sample, small_llama, weighted
from rank_pair import run_on_two_ranks

from agentrl.engines.base import WeightSource
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.engines.remote import RemoteEngine
from agentrl.engines.weight_update import UpdateSettings
from agentrl.train import zero
from agentrl.train.batch import Sample
from agentrl.train.learner import Learner
from agentrl.types import SamplingParams

FAKE = Path(__file__).parents[1] / "engines" / "fake"
ENGINE = {"kind": "vllm", "num_engines": 2, "env": {"PYTHONPATH": str(FAKE)}}
PROMPT = (3, 4, 5)


def test_two_ranks_draw_their_weights_again_for_the_servers_that_are_left(tmp_path: Path) -> None:
    run_on_two_ranks(Path(__file__).name, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["drawn"] == [1, 2, 2, 3]
    assert [version for version, _ in found["held"]] == [1, 1, 2, 3, 3]
    assert max(gap for _, gap in found["held"]) < 1e-5


async def drive(learner: Learner, folder: Path) -> None:
    """Three steps and updates; a server dies in the second and is back for the third."""
    learner.save_pretrained(folder / "model")
    pool = make_engine(learner.config, run_dir=folder, model_folder=folder / "model")
    assert isinstance(pool, EnginePool)
    pool._update = UpdateSettings(bucket_bytes=1 << 10)
    samples = weighted([random_sample(np.random.default_rng(0), length=9, sampled=5)])
    drawn: list[int] = []
    held: list[tuple[int, float]] = []
    try:
        await pool.start()
        for version in (1, 2, 3):
            learner.forward_backward(samples, learner.config.algo)
            learner.step()
            source = learner.weight_source(version)
            supervisor = psutil.Process(pool.engines[0].server.pid)  # type: ignore[union-attr]
            victims = supervisor.children() if version == 2 else []
            weights = partial(draw, source, victims, drawn)
            await pool.update_weights(replace(source, named_weights=weights))
            newest = [engine for engine in pool.engines if engine.weight_version == version]
            held += [await holds(engine, learner) for engine in newest]
            await pool.settled()
    finally:
        await pool.close()
    (folder / "found.json").write_text(json.dumps({"drawn": drawn, "held": held}))


def draw(
    source: WeightSource, victims: list[psutil.Process], drawn: list[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    drawn.append(source.version)
    for name, weight in source.named_weights():
        if victims and name == "model.norm.weight":  # the last: most buckets have arrived
            victims.pop().kill()
        yield name, weight


async def holds(engine: RemoteEngine, learner: Learner) -> tuple[int, float]:
    """The version an engine samples from, and how far that is from what the ranks compute."""
    said = await engine.generate(PROMPT, SamplingParams(8))
    ids = np.array([*PROMPT, *said.token_ids], np.int32)
    [wanted] = learner.logprobs([Sample(ids, np.arange(len(PROMPT), len(ids), dtype=np.int32))])
    assert said.logprobs is not None
    return int(said.weight_versions[0]), float(abs(said.logprobs - wanted).max())


def main() -> None:
    zero.BUCKET_NUMEL = 500  # each drawing is several collectives
    rollout = {"max_tokens": 40, "max_new_tokens": 8}
    config = make_config(engine=ENGINE, rollout=rollout, train={"lr": 1e-2})
    learner = Learner(small_llama(), config)
    if learner.group.rank != 0:
        learner.follow()
        return
    try:
        asyncio.run(drive(learner, Path(sys.argv[1])))
    finally:
        learner.close()


if __name__ == "__main__":
    main()
