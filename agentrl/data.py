"""Where examples come from: a file, a Hugging Face dataset or the agent's own `examples(split)`.

Ids and order of the rows are stable, and what is wrong with them is said before a run starts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.config import DataConfig
from agentrl.errors import DependencyError, UsageError
from agentrl.plugin import Agent, blame_user_code
from agentrl.types import Example

__all__ = ["Examples", "load_examples"]

logger = logging.getLogger(__name__)

MAX_UNSIZED_ROWS = 1_000_000
"""An iterator that goes on longer than this is taken for an endless one."""


class Examples:
    """Rows with stable ids: `row["id"]` where there is one, else the row's index.

    Args:
        rows: a sequence of dicts; a Hugging Face dataset stays on disk until a row is drawn.
        source: where they come from, for messages.
        prompt_key: a field that every row must have.
        max_samples: only the first ones.
    """

    def __init__(
        self,
        rows: SequenceABC[Example],
        source: str,
        *,
        prompt_key: str | None = None,
        max_samples: int | None = None,
    ) -> None:
        self._rows = rows
        self._source = source
        self._prompt_key = prompt_key
        self._size = len(rows) if max_samples is None else min(len(rows), max_samples)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[str, Example]:
        """The (example_id, example) at `index`.

        Raises:
            UsageError: the row is not a dict, or has no prompt.
        """
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} of {self._size} examples")
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise UsageError(
                f"row {index} of {self._source} is a {type(row).__name__}: every example must be "
                'a dict of fields, such as {"prompt": ...}'
            )
        if self._prompt_key is not None and row.get(self._prompt_key) is None:
            fields = ", ".join(map(str, row)) or "no fields"
            raise UsageError(
                f"row {index} of {self._source} has no {self._prompt_key!r} (it has: {fields}): "
                "set data.prompt_key (or the agent's prompt_key) to the one with the prompt"
            )
        identifier = row.get("id")
        return str(index if identifier is None else identifier), dict(row)


def load_examples(data: DataConfig, agent: Agent, *, evaluation: bool = False) -> Examples:
    """The examples to train on, or to evaluate on.

    `data.path` goes before the agent's own `examples(split)`. Ids and order are stable.

    Args:
        data: the section `data` of the configuration.
        agent: whose `examples` are used, and who says whether every row needs a prompt.
        evaluation: use `data.eval_path` and `data.eval_split`.

    Raises:
        UsageError: no such file, a bad line, no rows, a row without the prompt.
        DependencyError: a Hugging Face dataset without the extra `datasets`.
    """
    path = (evaluation and data.eval_path) or data.path
    split = data.eval_split if evaluation else data.split
    if path is not None:
        source = path
        rows = _read_path(path, split)
        if evaluation and data.eval_path is None and Path(path).is_file():
            logger.warning(
                "%s has no splits: evaluating on the examples of training; set data.eval_path", path
            )
    elif agent.examples is not None:
        source = f"examples({split!r})"
        with blame_user_code(agent.path, source):
            rows = _materialize(agent.examples(split), data.max_samples, source)
    else:
        raise UsageError(
            f"there are no examples: set data.path, or define `examples(split)` in {agent.path}"
        )
    if len(rows) == 0:
        raise UsageError(f"{source} is empty: give it at least one example")
    examples = Examples(
        rows,
        source,
        prompt_key=agent.prompt_key(data),
        max_samples=data.max_samples,
    )
    # Rows in memory are all looked at now; reading a data set from disk to its end could take
    # minutes, and its rows all have the same columns.
    for index in range(len(examples) if isinstance(rows, list) else 1):
        examples[index]
    return examples


def _read_path(path: str, split: str) -> SequenceABC[Example]:
    file = Path(path).expanduser()
    if file.is_dir():
        return _read_hub(str(file), split)
    if file.suffix in (".jsonl", ".json", ".parquet"):
        if not file.is_file():
            raise UsageError(f"data file {path} does not exist: correct data.path")
        return _read_parquet(file) if file.suffix == ".parquet" else _read_json(file)
    if file.exists():
        raise UsageError(
            f"cannot read {path}: data.path takes .jsonl, .json and .parquet files, "
            "folders and names of Hugging Face datasets"
        )
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UsageError(f"{path} does not exist: correct data.path")
    return _read_hub(path, split)


def _read_json(file: Path) -> list[Example]:
    """JSON Lines, or one JSON array."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    if text.lstrip().startswith("["):
        rows: list[Example] = _parse(text, f"{file}")
        return rows
    # Not `splitlines`, which also breaks at characters that JSON allows inside a string.
    lines = enumerate(text.split("\n"), start=1)
    return [_parse(line, f"{file} line {number}") for number, line in lines if line.strip()]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON ({error}): correct or remove it") from error


def _read_parquet(file: Path) -> list[Example]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Example] = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"cannot read {file} as Parquet ({error})") from error
    return rows


def _read_hub(name: str, split: str) -> SequenceABC[Example]:
    """A Hugging Face dataset: a folder that `save_to_disk` wrote, another folder, or a hub name."""
    try:
        import datasets
    except ImportError as error:
        raise DependencyError(
            f"reading {name} needs the extra `datasets`: pip install 'agentrl[datasets]'"
        ) from error
    saved = [Path(name, marker) for marker in ("state.json", "dataset_dict.json")]
    try:
        if any(marker.is_file() for marker in saved):
            loaded = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"cannot load the split {split!r} of the dataset {name} ({error}): correct data.path "
            "or the split (data.split, data.eval_split)"
        ) from error
    rows: SequenceABC[Example] = loaded
    return rows


def _materialize(value: object, max_samples: int | None, source: str) -> SequenceABC[Example]:
    """What `examples(split)` returned, as a sequence."""
    if isinstance(value, Mapping | str) or not isinstance(value, Iterable):
        raise UsageError(
            f"{source} returned a {type(value).__name__}: return a list, an iterator or a dataset "
            "of dicts"
        )
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        sized: SequenceABC[Example] = value  # type: ignore[assignment]
        return sized
    rows = list(islice(value, max_samples or MAX_UNSIZED_ROWS + 1))
    if len(rows) > MAX_UNSIZED_ROWS:
        raise UsageError(
            f"{source} went on after {MAX_UNSIZED_ROWS} examples: set data.max_samples to take "
            "the first ones of an endless iterator"
        )
    return rows
