"""A LoRA adapter alone through a folder that the servers read, while the base stays where it is.

The folder holds `adapter_config.json` and `adapter_model.safetensors`. It is complete when it has
its final name, and the one before it goes when every engine has loaded the new one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from agentrl.engines.base import WeightSource
from agentrl.engines.transport.base import WeightReceiver
from agentrl.engines.transport.together import together
from agentrl.errors import EngineError, SaveError

__all__ = ["AdapterTransport"]


class AdapterTransport:
    """Writes `folder/adapter-N` and has every engine load it.

    Args:
        folder: Where versions are written; the servers must see it under the same path.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.newest: Path | None = None
        """The folder of the newest version that every engine has loaded."""

    async def send(self, receivers: Sequence[WeightReceiver], source: WeightSource) -> None:
        """Write the adapter of one version, then load it everywhere.

        Raises:
            EngineError: a receiver failed, or `source` has no adapter.
            SaveError: the folder cannot be written.
        """
        if source.save_adapter is None:
            raise EngineError(
                "the weights have no LoRA adapter to send: set engine.lora merged, or train one "
                "with model.lora.rank"
            )
        folder = self._folder / f"adapter-{source.version}"
        aside = folder.with_suffix(".incomplete")
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        writing = asyncio.ensure_future(
            asyncio.to_thread(_write, source.save_adapter, aside, folder, device)
        )
        try:
            await asyncio.shield(writing)
        except OSError as error:
            raise SaveError(
                f"the adapter cannot be written to {aside} ({error}): free space there"
            ) from error
        finally:
            await asyncio.wait([writing])  # it is a collective of all learner ranks
        await together(receiver.load_adapter(folder) for receiver in receivers)
        previous, self.newest = self.newest, folder
        if previous is not None and previous != folder:
            await asyncio.to_thread(shutil.rmtree, previous, ignore_errors=True)

    async def load_newest(self, receiver: WeightReceiver) -> None:
        """Bring the newest version into an engine that was started again."""
        assert self.newest is not None
        await receiver.load_adapter(self.newest)

    async def close(self) -> None:
        """Nothing is held."""


def _write(save: Callable[[Path], None], aside: Path, folder: Path, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # the current device belongs to a thread
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
