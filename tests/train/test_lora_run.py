"""A whole run that trains LoRA factors with the embedded engine, and its resumption."""

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM
from whole_runs import assert_same_run, command, metrics_of, run

from agentrl.config import ModelConfig
from agentrl.models.load import load_policy

SETTINGS = (
    *("--model.lora.rank", "4", "--algo.kl.coef", "0.01"),
    *("--algo.advantage.drop_zero_variance", "false"),  # every step is to train
)


@pytest.mark.slow
def test_a_run_trains_an_adapter_and_resumes_from_its_checkpoint_bit_for_bit(tmp_path: Path):
    run_dir = tmp_path / "whole"
    status, _, err = run(command(run_dir, *SETTINGS, "--train.max_steps", "3"))
    assert status == 0, err
    # The engine samples from the merged weights of the step before: no mismatch to the learner.
    assert all(abs(line["mismatch/log_ratio_max"]) < 1e-5 for line in metrics_of(run_dir))
    assert metrics_of(run_dir)[0]["policy/kl"] < metrics_of(run_dir)[2]["policy/kl"]

    base = load_policy(ModelConfig(), seed=0)
    whole = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    adapted = peft.PeftModel.from_pretrained(base, run_dir / "adapter").merge_and_unload()
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(weight, adapted.get_parameter(name), atol=1e-6, rtol=0)

    saved = run_dir / "checkpoints" / "step-00000002"
    assert (saved / "adapter" / "adapter_config.json").is_file()
    cut = tmp_path / "cut"
    status, _, err = run(command(cut, *SETTINGS, "--train.max_steps", "2"))
    assert status == 0, err
    status, _, err = run(["-m", "agentrl", "train", "--resume", str(cut),
                          "--train.max_steps", "3"])  # fmt: skip
    assert status == 0, err
    assert_same_run(cut, run_dir)
