"""The parser of dotted flags: every key of `Config` is one, `--train.lr 1e-5`.

pydantic-settings makes the flags, their help and the nested values from the model; this file adds
errors that name the nearest known flag, and numbers such as `-1e-3` as values.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from agentrl.config import Config
from agentrl.errors import UsageError
from agentrl.settings import nearest_key

__all__ = ["ConfigFlags", "FlagParser"]

_SETTINGS_ERROR = "Parsing error encountered for "
_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose complaints are `UsageError`s with a remedy."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage of a hundred flags."""
        raise UsageError(
            f"{message.removeprefix('argument ')}; {self.prog} --help shows what is known"
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the whole command line.

        Raises:
            UsageError: an unknown flag, a flag without its value, a stray argument.
        """
        namespace, strays = self.parse_known_args(_attach_negative_numbers(argv))
        if strays:
            raise UsageError(self._stray(strays[0], namespace))
        return namespace

    def _stray(self, argument: str, namespace: argparse.Namespace) -> str:
        command = getattr(namespace, "command", None)
        if not argument.startswith("-"):
            hint = f"; did you mean --agent {argument}?" if argument.endswith(".py") else ""
            return f"unexpected argument {argument!r}{hint or ': every value needs a flag'}"
        flag = argument.partition("=")[0]
        guess = nearest_key(flag.lstrip("-"), self._flags_of(command))
        remedy = f"did you mean --{guess}?" if guess else f"{self.prog} {command} --help lists all"
        return f"unknown flag {flag}: {remedy}"

    def _flags_of(self, command: str | None) -> list[str]:
        actions = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                actions += action.choices[command]._actions
        return [option.lstrip("-") for action in actions for option in action.option_strings]


class ConfigFlags:
    """The flags of `Config` on one (sub)parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._source: CliSettingsSource[Any] = CliSettingsSource(
            _ConfigFlagModel,
            root_parser=parser,
            cli_avoid_json=True,
            cli_hide_none_type=True,
            cli_use_class_docs_for_groups=True,
            formatter_class=_HelpFormatter,
        )

    def values(self, namespace: argparse.Namespace) -> Mapping[str, Any]:
        """The nested values of the flags that were given, unvalidated; `None` is written None.

        Raises:
            UsageError: a list or table that cannot be read.
        """
        try:
            return dict(self._source(parsed_args=namespace)())
        except SettingsError as error:
            key, _, reason = str(error).removeprefix(_SETTINGS_ERROR).partition(": ")
            raise UsageError(
                f"--{key}: {reason}; write a list as a,b or JSON, a table as name=value or JSON"
            ) from error


class _ConfigFlagModel(BaseSettings, Config):
    """What pydantic-settings reads the flags from. Never built, so no environment is read."""

    model_config = SettingsConfigDict(extra="forbid", protected_namespaces=())


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 110) - 2
        super().__init__(prog, max_help_position=38, width=width)

    def _get_help_string(self, action: argparse.Action) -> str:
        return (action.help or "").replace("(default: None)", "").strip()


def _attach_negative_numbers(argv: Sequence[str]) -> list[str]:
    """Write `--flag -1e-3` as `--flag=-1e-3`: argparse would take the number for a flag."""
    attached: list[str] = []
    for argument in argv:
        after_flag = attached and attached[-1].startswith("--") and "=" not in attached[-1]
        if after_flag and _NEGATIVE_NUMBER.fullmatch(argument):
            attached[-1] += f"={argument}"
        else:
            attached.append(argument)
    return attached
