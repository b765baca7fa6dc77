"""The task of `vs_trl.py`: write digits after a prompt of 512 characters.

Both frameworks score through `score`, which notes the time: between the last scores of one step
and of the next lies everything that a step is, in whatever order.
"""

import random
import string
import time

PROMPT, RESPONSE = 512, 64
GROUPS, MEMBERS = 4, 8

clock: list[tuple[float, float]] = []
"""Seconds of the wall and of the processor (all threads) at the end of each step's sampling."""
rewards: list[float] = []


def examples(split):
    draw = random.Random(split)
    return [
        {"prompt": "".join(draw.choices(string.ascii_lowercase + " ", k=PROMPT))}
        for _ in range(256)
    ]


def score(completion: str) -> float:
    """The share of digits, of as many characters as a response has."""
    reward = sum(character in string.digits for character in completion) / RESPONSE
    rewards.append(reward)
    if len(rewards) % (GROUPS * MEMBERS) == 0:
        clock.append((time.perf_counter(), time.process_time()))
    return reward
