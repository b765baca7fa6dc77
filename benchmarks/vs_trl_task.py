"""The task of `vs_trl.py` and `gpu/vs_trl.py`: write tokens of one kind after a prompt of letters.

Both frameworks score through `Task.score`, which notes the time: between the last scores of one
step and of the next lies everything that a step is, in whatever order. Each step is printed as one
line that begins with `MARK`, for `vs_trl_side.py` to read.
"""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MARK = "STEP "
EXAMPLES = 256


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of one step, in tokens of which each is a character of the prompt."""

    prompt: int = 512
    response: int = 64
    groups: int = 4
    members: int = 8
    scored: Literal["digits", "even ids"] = "digits"
    """What the reward is the share of: digits where few tokens exist and all are characters; even
    ids where there are too many for a model to meet a given one."""

    @property
    def episodes(self) -> int:
        return self.groups * self.members


class Task:
    """Examples and rewards of one run."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._rewards: list[float] = []

    def examples(self, split: str) -> list[dict[str, str]]:
        draw = random.Random(split)
        letters = string.ascii_lowercase + " "
        return [
            {"prompt": "".join(draw.choices(letters, k=self.workload.prompt))}
            for _ in range(EXAMPLES)
        ]

    def score(self, text: str, token_ids: Sequence[int]) -> float:
        """The reward of one response, from 0 to 1.

        Raises:
            ValueError: it has another length than all are to have.
        """
        length = self.workload.response
        if len(token_ids) != length:
            raise ValueError(
                f"a response of {len(token_ids)} tokens, where each is to have {length}"
            )
        if self.workload.scored == "digits":
            reward = sum(character in string.digits for character in text) / length
        else:
            reward = sum(token % 2 == 0 for token in token_ids) / length
        self._rewards.append(reward)
        if len(self._rewards) == self.workload.episodes:
            self._end_of_sampling()
        return reward

    def _end_of_sampling(self) -> None:
        step = {
            "wall": time.perf_counter(),
            "cpu": time.process_time(),
            "reward": sum(self._rewards) / len(self._rewards),
        }
        print(MARK + json.dumps(step), flush=True)
        self._rewards.clear()


current = Task(Workload())
"""The one that is run; `vs_trl_run.py` puts its own here before it loads the agent."""
