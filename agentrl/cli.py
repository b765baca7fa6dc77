"""The command `agentrl`: train, eval, check, view.

A command line is parsed and its configuration resolved before anything heavy is imported, so
that help and usage errors are quick. Exit status: 0 done, 1 the run failed, 2 wrong usage,
130 interrupted. Messages go to stderr without a traceback; an unexpected exception keeps its own.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl import __version__
from agentrl.errors import AgentRLError, UsageError
from agentrl.flags import ConfigFlags, FlagParser
from agentrl.settings import Layer, read_toml, resolve, to_toml

if TYPE_CHECKING:
    from agentrl.config import Config

__all__ = ["main"]

Command = Callable[[], int]
_NEWEST = "newest run of the agent"
_RUN_DIR = ("log", "run_dir")
_CONFIG_USAGE = "--agent FILE [--config FILE] [--section.key VALUE ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit status."""
    # Collecting what torch and deepspeed leave takes an ending process seconds, for nothing.
    atexit.register(gc.freeze)
    rank = int(os.environ.get("RANK", "0"))
    try:
        command = _parse(sys.argv[1:] if argv is None else argv)
    except AgentRLError as error:
        # Every rank of torchrun reads the same command line: one complaint is enough.
        return _fail(error, prefix="") if rank == 0 else error.exit_status
    try:
        return command()
    except AgentRLError as error:
        return _fail(error, prefix=f"[rank {rank}] " if rank else "")
    except KeyboardInterrupt:
        return _interrupted()
    except BaseExceptionGroup as group:
        # What Ctrl-C interrupts may be a task group of a library's, which wraps it.
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        return _interrupted()
    except BrokenPipeError:
        # The reader of our output (head, less) has gone. Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _interrupted() -> int:
    print("agentrl: interrupted", file=sys.stderr)
    return 130


def _fail(error: AgentRLError, *, prefix: str) -> int:
    for line in str(error).splitlines():
        print(f"{prefix}agentrl: {line}", file=sys.stderr)
    return error.exit_status


def _parse(argv: Sequence[str]) -> Command:
    parser = FlagParser(
        prog="agentrl",
        description="Train language-model agents over many turns with reinforcement learning.",
    )
    parser.add_argument("--version", action="version", version=f"agentrl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_train(commands)
    _add_eval(commands)
    _add_check(commands)
    _add_view(commands)
    namespace = parser.parse(argv)
    if namespace.command is None:
        parser.print_help()
        return lambda: 0
    prepare: Callable[[argparse.Namespace], Command] = namespace.prepare
    return prepare(namespace)


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        usage=f"agentrl train {_CONFIG_USAGE} [--resume [RUN_DIR]] [--dry-run]",
        help="train an agent",
        description="Train an agent. Defaults < --config file < flags. Every flag is also a key "
        "of the TOML file.",
    )
    flags = _add_config_flags(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=_NEWEST,
        metavar="RUN_DIR",
        help="go on with a run and its configuration: RUN_DIR, else log.run_dir, else the newest "
        "run of the agent in runs/",
    )
    _add_dry_run(parser)
    parser.set_defaults(prepare=lambda namespace: _prepare_train(flags, namespace))


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        usage=f"agentrl eval {_CONFIG_USAGE} [--json] [--dry-run]",
        help="run an agent without training it",
        description="Run an agent on its evaluation examples and print mean reward, standard "
        "error, pass@k and stop reasons.",
    )
    flags = _add_config_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_dry_run(parser)
    parser.set_defaults(prepare=lambda namespace: _prepare_eval(flags, namespace))


def _add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        usage=f"agentrl check {_CONFIG_USAGE} [--dry-run]",
        help="find what is wrong with an agent file, without a model",
        description="Run an agent file against a scripted engine and report what is wrong with "
        "it. Exit status 1 when something is.",
    )
    flags = _add_config_flags(parser)
    _add_dry_run(parser)
    parser.set_defaults(prepare=lambda namespace: _prepare_check(flags, namespace))


def _add_view(commands: Any) -> None:
    parser = commands.add_parser(
        "view",
        help="open the report of a run",
        description="Write report.html and curve.png into a run directory and open the page.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--no-open", action="store_true", help="write the files, open nothing")
    parser.set_defaults(prepare=_prepare_view)


def _add_config_flags(parser: argparse.ArgumentParser) -> ConfigFlags:
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings")
    return ConfigFlags(parser)


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration as TOML and stop"
    )


def _prepare_train(flags: ConfigFlags, namespace: argparse.Namespace) -> Command:
    layers = _layers(flags, namespace)
    resume = namespace.resume is not None
    if resume:
        run_dir = _run_to_resume(namespace.resume, layers)
        run_layer = Layer({"log": {"run_dir": str(run_dir)}})
        layers = [read_toml(run_dir / "config.toml"), *layers, run_layer]
    config = resolve(layers)

    def run() -> int:
        from agentrl.train.loop import train

        train(config, resume=resume)
        return 0

    return _dry_run(config) if namespace.dry_run else run


def _prepare_eval(flags: ConfigFlags, namespace: argparse.Namespace) -> Command:
    config = resolve(_layers(flags, namespace))

    def run() -> int:
        from agentrl.train.evaluate import evaluate
        from agentrl.view.eval_table import print_eval

        print_eval(evaluate(config), as_json=namespace.json)
        return 0

    return _dry_run(config) if namespace.dry_run else run


def _prepare_check(flags: ConfigFlags, namespace: argparse.Namespace) -> Command:
    config = resolve(_layers(flags, namespace))

    def run() -> int:
        from rich.console import Console

        from agentrl.check import check_agent

        report = check_agent(config.agent, config)
        if sys.stdout.isatty():
            Console().print(report)
        else:
            print(report)
        return 0 if report.ok else 1

    return _dry_run(config) if namespace.dry_run else run


def _prepare_view(namespace: argparse.Namespace) -> Command:
    def run() -> int:
        import webbrowser

        from agentrl.view.report import build_report

        page = build_report(namespace.run)
        print(page)
        if not namespace.no_open:
            webbrowser.open(page.resolve().as_uri())
        return 0

    return run


def _layers(flags: ConfigFlags, namespace: argparse.Namespace) -> list[Layer]:
    files = [read_toml(namespace.config)] if namespace.config else []
    return [*files, Layer(flags.values(namespace))]


def _run_to_resume(wanted: str, layers: list[Layer]) -> Path:
    """Find the run directory that `--resume` means.

    Raises:
        UsageError: there is none, or two different ones are named.
    """
    from agentrl.train.rundir import newest_run

    named = [str(layer.values["log"]["run_dir"]) for layer in layers if layer.holds(_RUN_DIR)]
    if wanted != _NEWEST:
        flag = layers[-1]
        if flag.holds(_RUN_DIR) and Path(named[-1]) != Path(wanted):
            raise UsageError(
                f"--resume names {wanted} but --log.run_dir names {named[-1]}: give one of them"
            )
        run_dir = Path(wanted)
    elif named:
        run_dir = Path(named[-1])
    else:
        run_dir = newest_run(resolve(layers).agent)
    if not (run_dir / "config.toml").is_file():
        raise UsageError(
            f"nothing to resume in {run_dir}: it holds no config.toml; give the directory of a "
            "run, or leave --resume out to start one"
        )
    return run_dir


def _dry_run(config: Config) -> Command:
    def run() -> int:
        print(to_toml(config), end="")
        return 0

    return run
