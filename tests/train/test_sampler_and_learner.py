"""The embedded engine samples, the learner trains: both mean the same by a log-probability."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_formats import make_tokenizer
from embedded_models import prompt, serving
from learner_parts import VOCAB, make_config, small_llama
from transformers import GenerationConfig

from agentrl.chat.record import TokenRecord
from agentrl.engines.scripted import ScriptedEngine
from agentrl.executors.groups import GroupRequest
from agentrl.plugin import load_agent
from agentrl.train.learner import Learner
from agentrl.train.sampler import Sampler
from agentrl.train.update import policy_update
from agentrl.types import SamplingParams, StopReason, Trajectory


async def sampled(*temperatures: float) -> list[Trajectory]:
    """Four episodes of two turns, at these temperatures in turn, in one group."""
    episodes = []
    async with serving(small_llama().eval()) as engine:
        for number in range(4):
            record = TokenRecord()
            for turn in range(2):
                record.extend([i % VOCAB for i in prompt(5 + number, seed=10 * number + turn)])
                temperature = temperatures[turn % len(temperatures)]
                params = SamplingParams(6 + turn, temperature=temperature, seed=number)
                record.sample(await engine.generate(record.token_ids, params))
            sequence = record.sequence()
            assert sequence is not None
            episodes.append(Trajectory((sequence,), float(number), StopReason.DONE, group_id="g"))
    return episodes


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_the_first_ratio_is_one_against_the_samplers_own_logprobs(temperature: float):
    """TRL#4159, verl#6240: raw and tempered log-probabilities were mixed; weights unchanged."""
    config = make_config(
        rollout={"temperature": temperature}, algo={"loss": {"old_logprobs": "sampler"}}
    )
    learner = Learner(small_llama(), config)
    metrics = policy_update(learner, await sampled(temperature), config)
    learner.close()
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["mismatch/log_ratio_max"] < 1e-4


@pytest.mark.parametrize("sharing", ["trie", "packed", "padded"])
async def test_each_turn_is_scored_at_the_temperature_it_was_sampled_at(sharing: str):
    config = make_config(
        algo={"loss": {"old_logprobs": "sampler"}}, train={"prefix_sharing": sharing}
    )
    learner = Learner(small_llama(), config)
    metrics = policy_update(learner, await sampled(0.6, 1.4), config)
    learner.close()
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/log_ratio_max"] < 1e-4


async def test_greedy_turns_are_context_and_teach_nothing():
    config, episodes = make_config(), await sampled(1.0, 0.0)
    learner = Learner(small_llama(), config)
    metrics = policy_update(learner, episodes, config)
    assert metrics["policy/tokens_trained"] == 4 * 6
    before = [weight.clone() for _, weight in learner.named_weights()]
    metrics = policy_update(learner, await sampled(0.0), config)
    assert metrics["policy/skipped_updates"] == 1
    after = [weight for _, weight in learner.named_weights()]
    assert all(map(torch.equal, before, after))
    learner.close()


async def test_a_learner_at_another_temperature_would_be_seen():
    config, episodes = make_config(), await sampled(0.6)
    wrong = [replace(turn, temperature=1.0) for turn in episodes[0].sequences[0].turns]
    sequences = (replace(episodes[0].sequences[0], turns=tuple(wrong)),)
    episodes[0] = replace(episodes[0], sequences=sequences)
    learner = Learner(small_llama(), config)
    metrics = policy_update(learner, episodes, config)
    learner.close()
    assert metrics["mismatch/log_ratio_max"] > 0.1


@pytest.mark.parametrize("eos", [3, [3, 4]])
async def test_every_end_token_of_the_generation_config_reaches_the_engine(eos, tmp_path: Path):
    """verl#5649: the model ends its turns with a token that is not the tokenizer's eos."""
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import agentrl as rl\n"
        "class Once(rl.AgentInstance):\n"
        "    def reset(self, example): return 'Guess.'\n"
        "    def step(self, action): return rl.StepResult(reward=1.0, done=True)\n"
    )
    config = make_config().model_copy(update={"agent": agent})
    tokenizer = make_tokenizer("chatml", eos_token="<|endoftext|>")
    engine = ScriptedEngine([[9, 3, 9, 9]])
    generation = GenerationConfig(eos_token_id=eos)
    executor = load_agent(agent).make_executor(config.rollout, config.data)
    async with Sampler(config, executor, engine, tokenizer, generation) as sampler:
        result = await sampler.run([GroupRequest("g", "e", {}, 1)])
    wanted = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert set(engine.calls[0].params.stop_token_ids) == wanted | set(np.atleast_1d(eos).tolist())
    (sequence,) = result.trajectories[0].sequences
    assert sequence.token_ids[sequence.response_mask].tolist() == [9, 3]
    assert sequence.turns[0].finish_reason == "stop"
    assert json.dumps(result.trajectories[0].messages[-1]["content"]) != '""'
