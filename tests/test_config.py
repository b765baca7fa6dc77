"""How defaults, TOML files and flags become one configuration, and how it complains."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from agentrl.config import Config
from agentrl.errors import UsageError
from agentrl.flags import ConfigFlags, FlagParser
from agentrl.settings import (
    Layer,
    known_keys,
    nearest_key,
    read_toml,
    resolve,
    to_toml,
    without_secrets,
)


def from_flags(*argv: str) -> Config:
    parser = FlagParser(prog="agentrl")
    flags = ConfigFlags(parser)
    return resolve([Layer(flags.values(parser.parse(["--agent", "a.py", *argv])))])


def toml(tmp_path: Path, text: str) -> Layer:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return read_toml(path)


def complaint(*layers: Layer) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(layers)
    return str(caught.value)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = toml(tmp_path, 'agent = "a.py"\n[train]\nlr = 1e-3\nseed = 7\n')
    config = resolve([file, Layer({"train": {"lr": "1e-4"}})])
    assert (config.train.lr, config.train.seed, config.train.max_steps) == (1e-4, 7, 100)


def test_values_of_every_kind_can_be_flags() -> None:
    config = from_flags(
        "--algo.advantage.estimator=gae",
        "--data.shuffle",
        "false",
        "--train.betas",
        "0.8,0.99",
        "--data.max_samples",
        "12",
        "--log.run_dir",
        "runs/x",
        "--data.path",
        "None",
    )
    assert config.algo.advantage.estimator == "gae"
    assert config.data.shuffle is False
    assert config.train.betas == (0.8, 0.99)
    assert config.data.max_samples == 12
    assert config.log.run_dir == Path("runs/x")
    assert config.data.path is None


def test_a_negative_number_in_scientific_notation_is_a_value() -> None:
    assert from_flags("--algo.entropy_coef", "-1e-3").algo.entropy_coef == -1e-3


@pytest.mark.parametrize("argv", ["--train.lr inf", "--rollout.temperature inf", "--train.seed -1"])
def test_a_number_that_no_run_could_use_is_refused(argv: str) -> None:
    with pytest.raises(UsageError, match=argv.split()[0]):
        from_flags(*argv.split())


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert from_flags("--train.lr", "1", "--train.lr", "2").train.lr == 2


def test_every_key_has_a_flag() -> None:
    parser = FlagParser(prog="agentrl")
    ConfigFlags(parser)
    text = parser.format_help()
    assert [key for key in known_keys() if f"--{key} " not in text] == []


def test_environment_variables_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN", '{"lr": 3}')
    monkeypatch.setenv("TRAIN.LR", "3")
    assert from_flags().train.lr == 1e-6


def test_lists_and_tables_can_be_flags() -> None:
    config = from_flags(
        *("--engine.kind", "vllm", "--engine.extra", '{"a": {"b": 2}, "c": true}'),
        *("--engine.env", "X=1,Y=2"),
    )
    assert config.engine.extra == {"a": {"b": 2}, "c": True}
    assert config.engine.env == {"X": "1", "Y": "2"}
    config = from_flags("--engine.kind", "vllm", "--engine.urls", "http://a:1,http://b:2")
    assert config.engine.urls == ("http://a:1", "http://b:2")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--algo.advantage.estimato", "gae"], "did you mean --algo.advantage.estimator?"),
        (["--train.temperature", "1"], "did you mean --rollout.temperature?"),
        (["--lr=1"], "did you mean --train.lr?"),
        (["--qqq", "1"], "unknown flag --qqq"),
        (["--train.lr"], "--train.lr: expected one argument"),
        (["b.py"], "did you mean --agent b.py?"),
    ],
)
def test_a_wrong_flag_names_itself_and_the_nearest_one(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_flags(*argv)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--algo.advantage.estimator", "gai"],
            "--algo.advantage.estimator: 'gai' is not one of grpo, dr_grpo, rloo",
        ),
        (["--train.lr", "-1"], "--train.lr: '-1' should be greater than 0"),
        (["--train.betas", "0.9"], "--train.betas: [0.9] has too few values"),
        (["--engine.extra", "{bad"], '--engine.extra: Missing end delimiter "}"; write a list'),
        (["--data.shuffle", "maybe"], "--data.shuffle: 'maybe' should be a valid boolean"),
        (["--train.max_steps", "ten"], "--train.max_steps: 'ten' should be a valid integer"),
    ],
)
def test_a_wrong_value_names_the_flag_the_value_and_what_is_allowed(
    argv: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        from_flags(*argv)
    assert str(caught.value).startswith(message)


def test_an_unknown_key_in_a_file_names_the_key_the_file_and_the_nearest(tmp_path: Path) -> None:
    file = toml(tmp_path, 'agent = "a.py"\n[train]\ntemperature = 0.5\n')
    assert complaint(file) == (
        f"unknown key train.temperature in {file.file}: did you mean rollout.temperature?"
    )


def test_every_mistake_gets_its_line(tmp_path: Path) -> None:
    file = toml(tmp_path, 'agent = "a.py"\n[train]\nlr = 0\nsteps = 3\n')
    assert len(complaint(file).splitlines()) == 2


def test_a_wrong_value_is_blamed_on_the_source_that_won(tmp_path: Path) -> None:
    file = toml(tmp_path, 'agent = "a.py"\n[train]\nlr = 1\n')
    assert complaint(file, Layer({"train": {"lr": "x"}})).startswith("--train.lr: 'x'")


def test_a_section_that_is_not_a_table_is_explained(tmp_path: Path) -> None:
    file = toml(tmp_path, 'agent = "a.py"\ntrain = 3\n')
    assert "3 is not a section; write [train]" in complaint(file)


def test_an_impossible_combination_reads_as_a_sentence() -> None:
    layer = Layer({"agent": "a.py", "rollout": {"n_samples_per_prompt": 1}})
    message = complaint(layer)
    assert message.startswith("rollout.n_samples_per_prompt is 1 but")
    assert "Value error" not in message
    assert "pydantic" not in message


def test_a_combination_that_is_impossible_within_a_section_reads_as_a_sentence() -> None:
    message = complaint(Layer({"agent": "a.py", "engine": {"num_engines": 2}}))
    assert message.startswith("engine.num_engines would be ignored")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "engine.kind transformers samples in this process: use vllm or sglang"),
        ("--engine.kind vllm --rollout.env_backend ray", "does not go with rollout.env_backend"),
        ("--engine.kind vllm --rollout.max_concurrency 2", "more than rollout.max_concurrency"),
    ],
)
def test_rollout_processes_that_could_do_nothing_are_refused(flags: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_flags("--rollout.num_processes", "3", *flags.split())


def test_what_toml_cannot_hold_is_a_usage_error() -> None:
    config = from_flags("--engine.kind", "vllm", "--engine.extra", '{"a": null}')
    with pytest.raises(UsageError, match="leave null out"):
        to_toml(config)


def test_secrets_are_masked_and_the_original_is_left_alone() -> None:
    values = {"engine": {"api_key": "hush", "env": {"TOKEN": "hush"}, "host": "h"}, "agent": "a"}
    shown = without_secrets(values)
    assert "hush" not in str(shown)
    assert (shown["agent"], shown["engine"]["host"]) == ("a", "h")
    assert list(shown["engine"]["env"]) == ["TOKEN"]
    assert values["engine"] == {"api_key": "hush", "env": {"TOKEN": "hush"}, "host": "h"}


def test_a_missing_agent_says_how_to_give_one() -> None:
    assert complaint(Layer({})).startswith("no agent file: give --agent path.py")


@pytest.mark.parametrize("text", ["[train\n", "a = 1\na = 2\n"])
def test_broken_toml_names_the_file_and_the_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"run\.toml is not valid TOML: .*line"):
        toml(tmp_path, text)


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.toml: No such file"):
        read_toml(tmp_path / "none.toml")


def test_toml_gives_back_an_equal_configuration(tmp_path: Path) -> None:
    config = from_flags("--train.lr", "0.1", "--train.betas", "0.3,0.7", "--log.run_dir", "x y")
    assert resolve([toml(tmp_path, to_toml(config))]) == config


def test_what_may_be_none_is_none_by_default() -> None:
    """TOML has no null, so `to_toml` can leave out only what defaults to None."""

    def wrong(model: type[BaseModel]) -> list[str]:
        found: list[str] = []
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += wrong(kind)
            elif type(None) in get_args(kind) and field.default is not None:
                found.append(name)
        return found

    assert wrong(Config) == []


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rollout.n_sample_per_prompt", "rollout.n_samples_per_prompt"),
        ("n_samples_per_prompt", "rollout.n_samples_per_prompt"),
        ("algo.kl.estimater", "algo.kl.estimator"),
        ("zzzz", None),
    ],
)
def test_the_nearest_key(typed: str, meant: str | None) -> None:
    assert nearest_key(typed, known_keys()) == meant


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "algo.kl.coef is 0"),
        (["--algo.kl.coef", "0.1", "--model.lora.rank", "4"], "model.lora scores with the policy"),
    ],
)
def test_a_reference_that_is_no_second_model_cannot_be_offloaded(argv: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=f"train.reference_offload would be ignored.*{why}"):
        from_flags("--train.reference_offload", "true", *argv)


def test_a_learner_that_stays_on_the_gpu_is_refused_where_no_engine_shares_it() -> None:
    with pytest.raises(UsageError, match=r"train.offload_for_rollouts would be ignored.*sleep"):
        from_flags("--train.offload_for_rollouts", "false")


def test_experts_are_not_replayed_where_ranks_share_a_sequence() -> None:
    with pytest.raises(UsageError, match=r"rollout\.router_replay does not know which tokens"):
        from_flags("--rollout.router_replay", "true", "--train.sequence_parallel_size", "2")


def test_mini_batches_of_which_there_is_one_are_not_shuffled() -> None:
    with pytest.raises(UsageError, match=r"train\.shuffle would be ignored.*mini_batches is 1"):
        from_flags("--train.shuffle", "episodes")
