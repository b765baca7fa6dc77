"""Guess a hidden number: the environment answers higher, lower or correct.

Right in the last turn counts as much as right in the first. A guess that cannot be right after what
was said before wins nothing, and an episode that fails still earns a little for each guess that
could have been: a policy that starts from random weights needs to hear that it is on the way.
"""

import random
import re

import agentrl as rl

LARGEST = 5
MAX_GUESSES = 4
CREDIT = 0.3


class NumberGuess(rl.AgentInstance):
    async def reset(self, example):
        self.target = example["target"]
        self.low, self.high = 1, LARGEST
        self.guesses = self.sensible = 0
        return f"Guess my number from 1 to {LARGEST}"

    async def step(self, action):
        self.guesses += 1
        guess = self._read(action.text)
        if guess == self.target:
            return rl.StepResult(
                "correct", reward=1.0, done=True, metrics={"guesses": self.guesses}
            )
        answer = self._answer(guess)
        if self.guesses == MAX_GUESSES or action.finish_reason == "length":
            return rl.StepResult(answer, reward=self._credit(), score=0.0, done=True)
        return rl.StepResult(answer)

    def _read(self, text):
        found = re.search(r"\d+", text)
        return int(found.group()) if found else None

    def _answer(self, guess):
        if guess is None:
            return "a number"
        self.sensible += self.low <= guess <= self.high
        if guess < self.target:
            self.low = max(self.low, guess + 1)
            return "higher"
        self.high = min(self.high, guess - 1)
        return "lower"

    def _credit(self):
        return CREDIT * self.sensible / MAX_GUESSES


def examples(split):
    draw = random.Random(split)
    return [{"target": draw.randint(1, LARGEST)} for _ in range(2000 if split == "train" else 100)]
