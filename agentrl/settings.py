"""From files and flags to one `Config`: defaults, then TOML files, then flags.

Each source is a `Layer`; later layers win, key by key. Validation happens once, on the merged
values, and every complaint is traced back to the layer that holds the value. Environment
variables are never read. Relative paths, in a file as in a flag, start at the current directory.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from agentrl.config import Config
from agentrl.errors import UsageError

__all__ = [
    "Layer",
    "known_keys",
    "nearest_key",
    "read_toml",
    "resolve",
    "to_toml",
    "without_secrets",
]

_MASK = "(not shown)"


@dataclass(frozen=True, slots=True)
class Layer:
    """Nested values of one source. `file` is where they stood; None means flags."""

    values: Mapping[str, Any]
    file: Path | None = None

    def holds(self, key: tuple[str, ...]) -> bool:
        """True when this layer sets `key` or something inside it."""
        node: Any = self.values
        for part in key:
            if not isinstance(node, Mapping) or part not in node:
                return False
            node = node[part]
        return True

    def name(self, key: tuple[str, ...]) -> str:
        """How a user would point at `key` here: `--train.lr`, or `train.lr in run.toml`."""
        dotted = ".".join(key)
        return f"--{dotted}" if self.file is None else f"{dotted} in {self.file}"


def read_toml(path: Path) -> Layer:
    """Read a TOML file.

    Raises:
        UsageError: the file is missing, unreadable or not valid TOML.
    """
    try:
        return Layer(tomllib.loads(path.read_text(encoding="utf-8")), path)
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration file {path}: {error.strerror}; check --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error


def resolve(layers: Iterable[Layer]) -> Config:
    """Merge `layers`, the last one winning, over the defaults and validate the result.

    Raises:
        UsageError: an unknown key, a wrong value or an impossible combination; one line for each.
    """
    layers = list(layers)
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(merged, layer.values)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        complaints = [_complaint(dict(detail), layers) for detail in error.errors()]
        raise UsageError("\n".join(complaints)) from error


def to_toml(config: Config) -> str:
    """Write `config` as TOML that `--config` reads back to an equal one.

    TOML has no null: a key that is None is left out, which is its default.

    Raises:
        UsageError: a free table (`engine.extra`) holds null.
    """
    try:
        return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
    except TypeError as error:
        raise UsageError(f"the configuration does not fit TOML: {error}; leave null out") from error


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy nested values of a configuration for others to see: keys and environments masked."""
    shown = dict(values)
    if isinstance(engine := shown.get("engine"), Mapping):
        shown["engine"] = dict(engine)
        if engine.get("api_key"):
            shown["engine"]["api_key"] = _MASK
        if engine.get("env"):
            shown["engine"]["env"] = dict.fromkeys(engine["env"], _MASK)
    return shown


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the configuration, in the order of the sections."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += known_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Find what `key` was probably meant to be: the same name in another section, or a typo."""
    known = list(known)
    name = key.rpartition(".")[2]
    same_name = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    if same_name:
        return difflib.get_close_matches(key, same_name, n=1, cutoff=0)[0]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if close:
        return close[0]
    by_name = {candidate.rpartition(".")[2]: candidate for candidate in reversed(known)}
    close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
    return by_name[close[0]] if close else None


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _complaint(detail: dict[str, Any], layers: list[Layer]) -> str:
    """One pydantic error as a sentence that names the place, the value and what is allowed."""
    key = tuple(str(part) for part in detail["loc"] if isinstance(part, str))
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "value_error" and (not key or isinstance(value, Mapping)):
        # A check of a whole section: its message names the keys itself.
        return str(detail["msg"]).removeprefix("Value error, ")
    place = _place(key, layers)
    if kind == "missing" and key == ("agent",):
        return 'no agent file: give --agent path.py, or agent = "path.py" in the --config file'
    if kind == "missing":
        return f"{place}: {value!r} has too few values"
    if kind == "extra_forbidden":
        guess = nearest_key(".".join(key), known_keys())
        remedy = f"did you mean {guess}?" if guess else "agentrl train --help lists every key"
        return f"unknown key {place}: {remedy}"
    if kind == "literal_error":
        return f"{place}: {value!r} is not one of {_unquoted(context['expected'])}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{place}: {value!r} is not a section; write [{'.'.join(key)}] and its keys"
    message = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return f"{place}: {value!r} {message}"


def _place(key: tuple[str, ...], layers: list[Layer]) -> str:
    for layer in reversed(layers):
        if layer.holds(key):
            return layer.name(key)
    return ".".join(key)


def _unquoted(expected: str) -> str:
    return expected.replace("'", "").replace(" or ", ", ")
