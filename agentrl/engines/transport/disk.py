"""Weights through a folder of safetensors that the servers read: works wherever a disk is shared.

The folder is complete when it has its final name, and the one before it goes when every engine has
loaded the new one; a server that is started again may load it too.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.engines.transport.base import WeightReceiver, WeightTransport
from agentrl.engines.transport.buckets import Bucket
from agentrl.engines.transport.together import together
from agentrl.errors import SaveError

__all__ = ["DiskTransport"]

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


class DiskTransport(WeightTransport):
    """Writes `folder/version-N` and has every engine load it.

    Args:
        folder: Where versions are written; the servers must see it under the same path.
        model_folder: Whose configuration and tokenizer files are copied beside the weights, so that
            each version is a model that can be loaded by itself.
    """

    name = "disk"

    def __init__(self, folder: Path, model_folder: Path | None = None) -> None:
        self._folder = folder.resolve()
        self._model_folder = model_folder
        self.newest: Path | None = None
        """The folder of the newest version that every engine has loaded."""

    async def send(
        self,
        receivers: Sequence[WeightReceiver],
        buckets: AsyncIterator[Bucket],
        version: int,
    ) -> None:
        """Write the version, then load it everywhere; see `WeightTransport.send`.

        Raises:
            SaveError: the folder cannot be written.
        """
        folder = self._folder / f"version-{version}"
        aside = folder.with_suffix(".incomplete")
        try:
            await asyncio.to_thread(self._begin, aside)
            index: dict[str, str] = {}
            async for bucket in buckets:
                file = f"model-{len(set(index.values())):05d}.safetensors"
                tensors = {name: tensor.cpu() for name, tensor in bucket.tensors()}
                await asyncio.to_thread(_save, tensors, aside / file)
                bucket.release()
                index.update(dict.fromkeys(tensors, file))
            await asyncio.to_thread(_finish, aside, folder, index)
        except OSError as error:
            raise SaveError(
                f"the weights cannot be written to {aside} ({error}): free space there, or choose "
                "another engine.transport"
            ) from error
        await together(receiver.load_folder(folder) for receiver in receivers)
        previous, self.newest = self.newest, folder
        if previous is not None and previous != folder:
            await asyncio.to_thread(shutil.rmtree, previous, ignore_errors=True)

    async def load_newest(self, receiver: WeightReceiver) -> None:
        """Bring the newest version into an engine that was started again."""
        assert self.newest is not None
        await receiver.load_folder(self.newest)

    def _begin(self, aside: Path) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for path in self._model_folder.iterdir() if self._model_folder else ():
            holds_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
            if path.is_file() and not holds_weights:
                shutil.copy2(path, aside / path.name)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, str(path), metadata={"format": "pt"})


def _finish(aside: Path, folder: Path, index: dict[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": index})
    (aside / "model.safetensors.index.json").write_text(text)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
