"""The task of `async_training.py`: guess a number, with an environment that takes its time."""

import asyncio
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "agents"))

from number_guess import NumberGuess, examples

__all__ = ["SlowGuess", "examples"]

MEDIAN, SIGMA = 0.1, 1.0
"""Of the log-normal seconds that a step takes."""


class SlowGuess(NumberGuess):
    async def step(self, action):
        await asyncio.sleep(random.lognormvariate(math.log(MEDIAN), SIGMA))
        return await super().step(action)
