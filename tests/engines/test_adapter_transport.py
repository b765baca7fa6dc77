"""The learner's side of an adapter's way to the engines."""

import asyncio
import time
from pathlib import Path

import pytest

from agentrl.engines.base import WeightSource
from agentrl.engines.transport.adapter import AdapterTransport


async def test_an_update_that_is_given_up_waits_until_the_adapter_is_saved(tmp_path: Path) -> None:
    # All learner ranks take part in saving: a second one beside it would never end.
    saved = []

    def save(folder: Path) -> None:
        time.sleep(0.3)
        saved.append(folder)

    source = WeightSource(lambda: iter(()), 1, save_adapter=save)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await AdapterTransport(tmp_path).send([], source)
    assert saved
