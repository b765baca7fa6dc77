"""The environment of `env_backends.py`: a step that computes for as long as its example says."""

import time

import agentrl as rl


class Computes(rl.AgentInstance):
    def reset(self, example):
        self.seconds = example["seconds"]
        return "begin"

    def step(self, action):
        # CPU time of this thread: what others on the machine do makes it no shorter.
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return rl.StepResult(reward=1.0, done=True)
