"""OpenRLHF's agent files run with only their import line changed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from episodes import CHAT, make_llm, speaking

from agentrl import AgentError, StopReason, Trajectory, UsageError
from agentrl.config import DataConfig, RolloutConfig
from agentrl.executors.base import AgentExecutor
from agentrl.executors.openrlhf_sampling import from_vllm_names

IMPORT = "from agentrl.executors.openrlhf import AgentInstanceBase, MultiTurnAgentExecutor\n"

# In the manner of OpenRLHF's examples: an async constructor, tensors, and all six keys.
COUNTDOWN = f"""
import torch
{IMPORT}

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.seen = []

    async def reset(self, states: dict, **kwargs):
        return {{"observation": states["observation"]}}

    async def step(self, states: dict, **kwargs):
        self.step_idx += 1
        done = self.step_idx >= states["label"]
        SEEN.append(dict(states))
        return {{
            "rewards": torch.tensor(0.5),
            "scores": torch.tensor([1.0]),
            "environment_feedback": "" if done else "\\n\\nHuman: again\\n\\nAssistant: ",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {{"turn_count": torch.tensor(self.step_idx)}},
        }}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)

SEEN = []
"""

# Older files read the prompt by another name and leave more out.
OLD = f"""
{IMPORT}

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.temperature = []

    async def reset(self, states: dict, **kwargs):
        return {{"observation": states["prompt"] + "!"}}

    async def step(self, states: dict, **kwargs):
        sampling = states["sampling_params"]
        sampling.temperature = 0.25
        return {{
            "rewards": 1.0,
            "environment_feedback": " more",
            "done": "stop" in states["action_text"],
            "sampling_params": sampling,
            "next_observation": "not read",
        }}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""

LOOP = """
from agentrl.executors.openrlhf import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ranges, logprobs = [], [0.0] * len(tokens)
        for _ in range(2):
            request = await llm_engine.generate(tokens, sampling_params)
            output = request.outputs[0]
            ranges.append((len(tokens) + SHIFT, len(tokens) + len(output.token_ids) + SHIFT))
            tokens = tokens + output.token_ids
            tokens = tokens + hf_tokenizer(" ok", add_special_tokens=False)["input_ids"]
        assert len(tokens) < max_length
        return {
            "prompt": prompt, "label": label, "reward": float(label), "scores": 1.0,
            "observation_tokens": tokens, "action_ranges": ranges[:RANGES],
            "rollout_log_probs": logprobs, "extra_logs": {"calls": 2},
        }

SHIFT, RANGES = 0, 2
"""


def load(source: str, tmp_path: Path, **data: str) -> tuple[AgentExecutor, dict]:
    path = tmp_path / "agent_func.py"
    path.write_text(source)
    module = runpy.run_path(str(path))
    executor = module["AgentExecutor"]()
    executor.configure(RolloutConfig(), DataConfig(**data))
    return executor, executor.execute.__globals__ if "SHIFT" in module else module


async def run(executor: AgentExecutor, example: dict, engine) -> Trajectory:
    return await executor.execute(example, make_llm(engine))


async def test_a_multi_turn_file_runs(tmp_path: Path) -> None:
    executor, module = load(COUNTDOWN, tmp_path)
    engine = speaking("40", "50")
    trajectory = await run(executor, {"prompt": "Human: guess\n\nAssistant: ", "label": 2}, engine)
    assert trajectory.stop_reason is StopReason.DONE
    assert (trajectory.reward, trajectory.score) == (1.0, 1.0)
    assert trajectory.metrics == {"turn_count": 2.0}
    first, second = module["SEEN"]
    assert first["observation_text"] == "Human: guess\n\nAssistant: "
    # As OpenRLHF gives it, the end-of-turn token is part of the text.
    assert first["action_text"] == "40<|im_end|>"
    again = "Human: guess\n\nAssistant: 40<|im_end|>\n\nHuman: again\n\nAssistant: "
    assert second["observation_text"] == again
    assert CHAT.decode(engine.calls[1].token_ids) == again


async def test_messages_are_rendered_by_the_chat_template(tmp_path: Path) -> None:
    executor, module = load(COUNTDOWN, tmp_path, prompt_key="question", label_key="turns")
    messages = [{"role": "user", "content": "Guess."}]
    await run(executor, {"question": messages, "turns": 1}, speaking("40"))
    (states,) = module["SEEN"]
    assert states["observation_text"] == CHAT.render(messages)
    assert states["label"] == 1


async def test_an_older_file_runs_and_changes_only_its_own_sampling(tmp_path: Path) -> None:
    executor, _ = load(OLD, tmp_path)
    engine = speaking("40", "stop")
    llm = make_llm(engine)
    trajectory = await executor.execute({"prompt": "Guess"}, llm)
    assert trajectory.reward == 2.0
    assert CHAT.decode(engine.calls[0].token_ids) == "Guess!"
    assert [call.params.temperature for call in engine.calls] == [1.0, 0.25]
    assert llm.sampling.temperature == 1.0


async def test_a_setting_without_effect_is_an_error(tmp_path: Path) -> None:
    executor, _ = load(OLD.replace("temperature = 0.25", "stop = ['x']"), tmp_path)
    with pytest.raises(AgentError, match="sets stop, which has no effect"):
        await run(executor, {"prompt": "Guess"}, speaking("40"))


def test_an_object_of_vllm_that_ignores_the_end_is_refused() -> None:
    params = type("Params", (), {"max_tokens": 4, "ignore_eos": False})()
    assert from_vllm_names(params) == {"max_new_tokens": 4}
    params.ignore_eos = True
    with pytest.raises(AgentError, match="sets ignore_eos, which has no effect"):
        from_vllm_names(params)


async def test_a_row_without_the_prompt_names_the_flag(tmp_path: Path) -> None:
    executor, _ = load(OLD, tmp_path)
    with pytest.raises(UsageError, match=r"'text'.*--data\.prompt_key"):
        await run(executor, {"text": "Guess"}, speaking("40"))


async def test_a_class_of_another_kind_is_refused() -> None:
    from agentrl.executors.openrlhf import MultiTurnAgentExecutor

    with pytest.raises(UsageError, match="must extend"):
        MultiTurnAgentExecutor(dict)


async def test_a_file_with_its_own_loop_runs(tmp_path: Path) -> None:
    executor, _ = load(LOOP, tmp_path)
    trajectory = await run(executor, {"prompt": "Guess", "label": 1}, speaking("40", "50"))
    assert (trajectory.reward, trajectory.metrics) == (1.0, {"calls": 2.0})
    (sequence,) = trajectory.sequences
    end = [CHAT.traits.end_token_id]
    assert sequence.token_ids.tolist() == [
        *CHAT.encode("Guess"),
        *CHAT.encode("40"),
        *end,
        *CHAT.encode(" ok"),
        *CHAT.encode("50"),
        *end,
    ]
    assert sequence.num_sampled == len(CHAT.encode("40")) + len(CHAT.encode("50")) + 2
    assert set(sequence.logprobs[sequence.response_mask].tolist()) == {-0.5}


@pytest.mark.parametrize("wrong", ["SHIFT, RANGES = 1, 2", "SHIFT, RANGES = 0, 1"])
async def test_ranges_that_do_not_hold_what_was_sampled_are_an_error(
    wrong: str, tmp_path: Path
) -> None:
    executor, _ = load(LOOP.replace("SHIFT, RANGES = 0, 2", wrong), tmp_path)
    with pytest.raises(AgentError, match="every call"):
        await run(executor, {"prompt": "Guess", "label": 1}, speaking("40", "50"))
