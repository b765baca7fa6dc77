"""Command lines and transports as functions of the configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config import Config, EngineConfig
from agentrl.engines.installed import check_python
from agentrl.engines.launch import server_options, sglang_launch, vllm_launch
from agentrl.engines.servers import _has_loader
from agentrl.engines.sglang import install_loader
from agentrl.engines.transport.select import check_transport, transport_name
from agentrl.engines.vllm import install_plugin
from agentrl.errors import UsageError


def test_options_become_flags() -> None:
    options = {"enforce_eager": True, "async_scheduling": False, "sizes": [1, 2], "seed": 0}
    assert server_options(options) == [
        "--enforce-eager",
        "--no-async-scheduling",
        "--sizes",
        "1",
        "2",
        "--seed",
        "0",
    ]


def test_a_table_becomes_json() -> None:
    flags = server_options({"compilation_config": {"mode": 3}})
    assert flags == ["--compilation-config", '{"mode": 3}']


def test_extra_options_go_through_and_win(tmp_path: Path) -> None:
    config = EngineConfig(
        kind="vllm", python="/venv/bin/python", extra={"max_num_seqs": 7, "quantization": "fp8"}
    )
    launch = vllm_launch(config, "m", dtype="bfloat16", max_model_len=64, plugin=tmp_path)
    line = launch.with_port(8000)
    assert line[:5] == ["/venv/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "m"]
    assert line[line.index("--max-num-seqs") + 1] == "7"
    assert line[line.index("--quantization") + 1] == "fp8"
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[-2:] == ["--port", "8000"]


def test_false_leaves_a_flag_of_sglang_out_which_has_no_other_word_against_it() -> None:
    extra = {"enable_metrics": False, "trust_remote_code": False}
    config = EngineConfig(kind="sglang", extra=extra)
    line = sglang_launch(config, "m", dtype="float32", max_model_len=64).command
    assert "--enable-cache-report" in line
    assert not any("metrics" in part or "remote" in part for part in line)


def test_the_plugin_comes_before_the_users_own_python_path(tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", env={"PYTHONPATH": "/mine"})
    launch = vllm_launch(config, "m", dtype="float32", max_model_len=64, plugin=tmp_path)
    assert launch.env["PYTHONPATH"] == f"{tmp_path}:/mine"


def test_an_api_key_does_not_show_in_vllms_command_line(tmp_path: Path) -> None:
    config = EngineConfig(kind="vllm", api_key="secret")
    launch = vllm_launch(config, "m", dtype="float32", max_model_len=64, plugin=tmp_path)
    assert "secret" not in launch.command
    assert launch.env["VLLM_API_KEY"] == "secret"


@pytest.mark.parametrize(
    ("transport", "learner", "server"),
    [("nccl", None, "1"), ("nccl", "0", "0"), ("ipc", None, None)],
)
def test_sglang_reaches_the_learners_memory_as_the_learner_reaches_its(
    transport: str, learner: str | None, server: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if learner is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", learner)
    config = EngineConfig(kind="sglang", transport=transport)  # type: ignore[arg-type]
    launch = sglang_launch(config, "m", dtype="bfloat16", max_model_len=64)
    assert launch.env.get("NCCL_CUMEM_ENABLE") == server


@pytest.mark.parametrize(("replicas", "allowed"), [(1, 65), (2, 66)])
def test_sglang_is_allowed_one_request_more_than_is_to_run(replicas: int, allowed: int) -> None:
    config = EngineConfig(kind="sglang", max_num_seqs=64, data_parallel_size=replicas)
    launch = sglang_launch(config, "m", dtype="float32", max_model_len=512)
    command = launch.with_port(1)
    assert command[command.index("--max-running-requests") + 1] == str(allowed)


def test_sglang_gets_room_for_the_tokens_it_keeps_for_itself() -> None:
    launch = sglang_launch(EngineConfig(kind="sglang"), "m", dtype="float32", max_model_len=512)
    line = launch.with_port(1)
    assert int(line[line.index("--context-length") + 1]) > 512


def test_where_no_gpu_is_the_servers_are_told_so_and_the_user_has_the_last_word(
    tmp_path: Path,
) -> None:
    sizes = {"dtype": "float32", "max_model_len": 64, "gpu": False}
    settings = {"max_num_seqs": 4, "extra": {"block_size": 64, "mem_fraction_static": 0.5}}
    launch = vllm_launch(EngineConfig(kind="vllm", **settings), "m", plugin=tmp_path, **sizes)
    line = launch.with_port(1)
    assert "--enforce-eager" in line
    assert line[line.index("--block-size") + 1] == "64"
    launch = sglang_launch(EngineConfig(kind="sglang", **settings), "m", **sizes)
    line = launch.with_port(1)
    assert line[line.index("--device") + 1] == "cpu"
    assert line[line.index("--mem-fraction-static") + 1] == "0.5"
    assert line[line.index("--max-total-tokens") + 1] == "512"  # 2 x 4 requests x 64 tokens
    assert launch.env["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.parametrize(
    "extra",
    [
        {"custom_weight_loader": ["their.loader"]},
        {"custom_weight_loader": "their.loader"},
        {"custom-weight-loader": ["their.loader"]},
    ],
)
def test_sglang_is_told_of_our_loader_beside_that_of_the_user(
    extra: dict[str, Any], tmp_path: Path
) -> None:
    folder = install_loader(tmp_path / "loader")
    section = EngineConfig(
        kind="sglang",
        env={"PYTHONPATH": "/theirs"},
        extra=extra,
    )
    launch = sglang_launch(section, "m", dtype="float32", max_model_len=512, loader=folder)
    line = launch.with_port(1)
    assert line.count("--custom-weight-loader") == 1
    start = line.index("--custom-weight-loader")
    assert line[start + 1 : start + 3] == ["agentrl_sglang_loader.load", "their.loader"]
    assert launch.env["PYTHONPATH"] == f"{folder}:/theirs"
    program = "from agentrl_sglang_loader import load; print(load.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == "load\n"


def test_the_plugin_is_found_as_an_installed_distribution(tmp_path: Path) -> None:
    import importlib.metadata

    folder = install_plugin(tmp_path / "plugin")
    (distribution,) = importlib.metadata.distributions(path=[str(folder)])
    (entry,) = distribution.entry_points
    assert entry.group == "vllm.general_plugins"
    assert (folder / entry.module / "__init__.py").is_file()


@pytest.mark.parametrize(
    ("settings", "on_gpu", "expected"),
    [
        ({}, False, "gloo"),
        ({}, True, "ipc"),
        ({"urls": ["http://127.0.0.1:1"]}, True, "ipc"),
        ({"urls": ["http://node-2:8000"]}, True, "nccl"),
        ({"transport": "disk"}, True, "disk"),
    ],
)
def test_auto_takes_the_transport_that_fits(
    settings: dict[str, Any], on_gpu: bool, expected: str
) -> None:
    assert transport_name(EngineConfig(kind="vllm", **settings), on_gpu=on_gpu) == expected


@pytest.mark.parametrize(
    ("settings", "on_gpu", "remedy"),
    [
        ({"kind": "vllm", "transport": "nccl"}, False, "gloo or disk"),
        ({"kind": "vllm", "transport": "ipc", "urls": ["http://node-2:1"]}, True, "one host only"),
        ({"kind": "sglang", "transport": "gloo", "data_parallel_size": 2}, True, "num_engines"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(
    settings: dict[str, Any], on_gpu: bool, remedy: str
) -> None:
    with pytest.raises(UsageError, match=remedy):
        transport_name(EngineConfig(**settings), on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kind": "transformers", "num_engines": 2}, "engine.num_engines"),
        ({"kind": "vllm", "urls": ["http://a"], "python": "/p"}, "engine.python"),
        ({"kind": "vllm", "sleep_level": 2}, "engine.enable_sleep"),
        ({"kind": "vllm", "gpus": [0, 1], "num_engines": 4}, "engine.gpus"),
        ({"kind": "vllm", "deterministic": False}, "engine.deterministic would be ignored"),
        ({"kind": "vllm", "urls": ["node-2:8000"]}, "write it as http://HOST:PORT"),
        ({"kind": "vllm", "urls": ["http://a:1", "http://a:1"]}, "names a server twice"),
        ({"kind": "vllm", "extra": {"tensor-parallel-size": 2}}, "use engine.tensor_parallel_size"),
        ({"kind": "sglang", "extra": {"dp_size": 2}}, "use engine.data_parallel_size"),
        ({"kind": "sglang", "extra": {"enable_memory_saver": False}}, "use engine.enable_sleep"),
        ({"kind": "vllm", "extra": {"block-size": 8, "block_size": 16}}, "names block-size twice"),
        (
            {"kind": "vllm", "extra": {"logprobs_mode": "raw_logprobs"}},
            "engine.extra.logprobs_mode",
        ),
    ],
)
def test_settings_that_would_be_ignored_are_errors(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        EngineConfig(**settings)


def test_a_server_elsewhere_needs_an_address_of_the_learner() -> None:
    elsewhere = {"kind": "vllm", "urls": ["http://node-2:8000"]}
    with pytest.raises(UsageError, match=r"engine\.host is 127\.0\.0\.1, at which http://node-2"):
        check_transport(EngineConfig(**elsewhere))
    check_transport(EngineConfig(**elsewhere, host="node-1"))
    check_transport(EngineConfig(**elsewhere, transport="disk"))
    check_transport(EngineConfig(kind="vllm", urls=["http://localhost:8000"]))


def test_a_python_that_is_no_program_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "python").touch()  # not executable
    for python in (tmp_path / "python", tmp_path / "no-such"):
        with pytest.raises(UsageError, match=rf"engine\.python {python} is no program"):
            check_python(EngineConfig(kind="vllm", python=python))
    check_python(EngineConfig(kind="vllm", python=sys.executable))
    check_python(EngineConfig(kind="vllm"))


@pytest.mark.parametrize("name", ["enable_eplb", "enable-eplb"])
def test_sglang_keeps_to_its_own_loader_where_experts_change_places(name: str) -> None:
    """A plan would copy weights to where their experts were before."""
    settings: dict[str, Any] = {"agent": "agent.py"}
    section = {"kind": "sglang", "transport": "ipc"}
    assert _has_loader(Config(**settings, engine=section))  # type: ignore[arg-type]
    moving = section | {"extra": {name: True}}
    assert not _has_loader(Config(**settings, engine=moving))  # type: ignore[arg-type]
