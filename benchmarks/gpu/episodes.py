"""The episodes that the GPU benchmarks sample: fixed lengths, random ids. Standard library only.

256 episodes of 4 turns, in groups of 8 that share a prompt of 512 tokens; a turn samples 128 tokens
and is answered with 128 of feedback.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

VOCAB = 150_000


@dataclass(frozen=True, slots=True)
class Workload:
    """How many episodes, and their lengths in tokens."""

    groups: int = 32
    members: int = 8
    turns: int = 4
    prompt: int = 512
    sampled: int = 128
    feedback: int = 128

    @property
    def episodes(self) -> int:
        """All of them."""
        return self.groups * self.members

    @property
    def tokens_sampled(self) -> int:
        """By all episodes."""
        return self.episodes * self.turns * self.sampled

    @property
    def max_model_len(self) -> int:
        """Tokens of a whole episode, and a few to spare."""
        return self.prompt + self.turns * (self.sampled + self.feedback) + 8

    def prompt_ids(self, group: int, seed: int) -> list[int]:
        """The prompt of a group; another `seed` gives another, which no cache holds."""
        return _ids(f"{seed}-{group}", self.prompt)

    def feedback_ids(self, group: int, member: int) -> Iterator[list[int]]:
        """What is answered to the turns of an episode."""
        for turn in range(self.turns):
            yield _ids(f"{group}-{member}-{turn}", self.feedback)


def _ids(name: str, count: int) -> list[int]:
    generator = random.Random(name)
    return [generator.randrange(VOCAB) for _ in range(count)]
