"""Whose turn it is on GPUs that a server engine and the learner share."""

from pathlib import Path

import pytest
from learner_parts import make_config

from agentrl.engines.remote import RemoteEngine
from agentrl.train.learner import Learner
from agentrl.train.loop import train

TESTS = Path(__file__).parents[1]
AGENT = TESTS.parent / "examples" / "agents" / "number_guess.py"


@pytest.mark.parametrize("learner_makes_room", [True, False])
def test_engine_and_learner_take_turns_and_an_evaluation_is_a_turn_too(
    tmp_path: Path, monkeypatch, learner_makes_room: bool
):
    calls: list[str] = []

    def note(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def noted(self, *arguments):
            calls.append(" ".join([name, *(str(a[0]) for a in arguments if isinstance(a, tuple))]))
            return original(self, *arguments)

        monkeypatch.setattr(owner, name, noted)

    for name in ("sleep", "wake", "set_version"):
        note(RemoteEngine, name)
    for name in ("offload", "reload", "step", "save"):
        note(Learner, name)
    config = make_config(
        engine={
            "kind": "vllm",
            "enable_sleep": True,
            "transport": "gloo",
            "env": {"PYTHONPATH": str(TESTS / "engines" / "fake")},
        },
        rollout={"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 3, "max_turns": 2,
                 "max_tokens": 160},
        algo={"advantage": {"drop_zero_variance": False}},
        train={"max_steps": 2, "eval_steps": 2, "save_steps": 1,
               "offload_for_rollouts": learner_makes_room},
        log={"run_dir": tmp_path / "run", "tensorboard": False},
    ).model_copy(update={"agent": AGENT})  # fmt: skip
    train(config)
    push = ["wake weights", "set_version"]
    turn = ["offload", "wake kv_cache", "sleep", "reload"]
    expected = [
        *("offload", "sleep", "reload"),  # around the start of the server
        *push,
        *turn,
        "step",
        *push,
        "save",
        *turn,
        "step",
        *push,
        *turn,
        *push,
        "save",
    ]
    moves = () if learner_makes_room else ("offload", "reload")
    assert calls == [call for call in expected if call not in moves]
