"""Whole runs, as a user starts them: real processes, real files, real signals."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import (
    STEPS,
    assert_same_run,
    command,
    metrics_of,
    run,
    start,
    wait_for_step,
    weights_of,
)

from agentrl.train.trajectories import read_trajectories


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    status, out, err = run(command(run_dir))
    assert status == 0, err
    assert str(run_dir / "report.html") in out
    return run_dir


def test_a_run_leaves_what_it_promises(uninterrupted: Path) -> None:
    assert [line["step"] for line in metrics_of(uninterrupted)] == list(range(1, STEPS + 1))
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert 0 <= summary["reward_first"] <= 1
    assert 0 <= summary["reward_last"] <= 1
    assert summary["train_seconds"] > 0
    for name in ("report.html", "curve.png", "config.toml"):
        assert (uninterrupted / name).stat().st_size > 0

    episodes = [
        trajectory
        for step in range(1, STEPS + 1)
        for trajectory in read_trajectories(uninterrupted / f"trajectories/{step:06d}.parquet")
    ]
    assert len({trajectory.rollout_id for trajectory in episodes}) == STEPS * 8 * 4
    assert sum(trajectory.num_sampled for trajectory in episodes) == summary["tokens_sampled"]
    # On-policy: a token of step k was sampled from the weights after k - 1 steps.
    for step in range(1, STEPS + 1):
        for trajectory in read_trajectories(uninterrupted / f"trajectories/{step:06d}.parquet"):
            for sequence in trajectory.sequences:
                assert set(sequence.weight_versions[sequence.response_mask]) == {step - 1}


def test_an_evaluation_before_the_first_step_is_step_0(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ("--train.eval_on_start", "true", "--data.max_samples", "16")
    status, _, err = run(command(run_dir, *flags, "--train.max_steps", "1"))
    assert status == 0, err
    before, first = metrics_of(run_dir)
    assert before["step"] == 0
    evaluated = read_trajectories(run_dir / "trajectories" / "eval-000000.parquet")
    assert before["eval/reward_mean"] == pytest.approx(
        sum(trajectory.reward or 0.0 for trajectory in evaluated) / len(evaluated)
    )
    for trajectory in evaluated:
        for sequence in trajectory.sequences:
            assert set(sequence.weight_versions[sequence.response_mask]) == {0}
    assert first["step"] == 1
    assert "eval/reward_mean" not in first


def test_the_final_model_is_a_hugging_face_folder_with_trained_weights(
    uninterrupted: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(uninterrupted / "model")
    tokenizer = AutoTokenizer.from_pretrained(uninterrupted / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert torch.isfinite(model(**ids).logits).all()

    from agentrl.models.tiny import build_tiny

    fresh, _ = build_tiny(0)
    assert not torch.equal(fresh.lm_head.weight, model.lm_head.weight)


def test_the_sampler_and_the_learner_agree_on_log_probabilities(uninterrupted: Path) -> None:
    trained = [line for line in metrics_of(uninterrupted) if not line["policy/skipped_updates"]]
    assert len(trained) >= 3
    for line in trained:
        assert abs(line["mismatch/log_ratio_max"]) < 1e-4


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_saves_its_finished_steps_and_resumes_to_the_same_bits(
    uninterrupted: Path, tmp_path: Path, signum: signal.Signals, status: int
) -> None:
    run_dir = tmp_path / "run"
    process = start(command(run_dir))
    wait_for_step(run_dir, 1, process)
    process.send_signal(signum)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert f"--resume {run_dir}" in err
    finished = len(metrics_of(run_dir))
    assert (run_dir / "checkpoints" / f"step-{finished:08d}").is_dir()

    resumed_status, _, err = run(["-m", "agentrl", "train", "--resume", str(run_dir)])
    assert resumed_status == 0, err
    assert_same_run(run_dir, uninterrupted)


def limit_files(size: int) -> Callable[[], None]:
    """A file that grows beyond `size` bytes fails as it does on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_is_one_message_and_loses_no_checkpoint(
    uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    status, _, err = run(command(run_dir, "--train.max_steps", "2"))
    assert status == 0, err

    status, _, err = run(command(run_dir, "--resume"), preexec_fn=limit_files(512 * 1024))
    assert status == 1
    assert "Traceback" not in err
    assert "step-00000004" in err
    assert "step-00000002 is kept" in err
    assert (run_dir / "checkpoints" / "step-00000002").is_dir()

    status, _, err = run(command(run_dir, "--resume"))
    assert status == 0, err
    assert_same_run(run_dir, uninterrupted)


def test_a_run_directory_that_exists_is_refused(uninterrupted: Path) -> None:
    before = weights_of(uninterrupted)
    status, _, err = run(command(uninterrupted))
    assert status == 2
    assert "--resume" in err
    assert weights_of(uninterrupted) == before


def test_two_ranks_train_as_one(uninterrupted: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    status, _, err = run(launcher + command(run_dir, "--train.max_steps", "4"))
    assert status == 0, err
    pairs = list(zip(metrics_of(uninterrupted), metrics_of(run_dir), strict=False))
    trained = [(one, two) for one, two in pairs if not one["policy/skipped_updates"]]
    assert trained
    for one, two in trained:
        assert two["reward/mean"] == one["reward/mean"]
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5)
