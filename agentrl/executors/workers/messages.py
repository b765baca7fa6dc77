"""What agentrl and a rollout process say to each other, beside the loans of requests.

agentrl                          rollout process
Setup                      ->    loads the agent's file and the tokenizer
                           <-    Ready, or Failed
Begin, Cancel              ->    runs one attempt at an episode
                           <-    Ended, once for each Begin
NewWeights                 ->
                           <-    Logged
Close                      ->    ends its attempts, closes its executor, and ends

What users' code made is sealed: pickled by itself, so that a value which cannot be made again on
the other side is the failure of one attempt, and not the end of the conversation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from agentrl.config import Config
from agentrl.engines.token_route import TokenRoute
from agentrl.executors.process.frames import Outcome, pickled, unpickled

__all__ = [
    "Begin",
    "Cancel",
    "Close",
    "Ended",
    "Failed",
    "Logged",
    "NewWeights",
    "Ready",
    "Setup",
    "opened",
    "sealed",
]

REMEDY = "use plain values, or set rollout.num_processes 1"


def sealed(value: object) -> bytes:
    """A value of the user's, to be sent; raises `AgentError` where it cannot be pickled."""
    return pickled(value, REMEDY)


def opened(body: bytes, what: str) -> Any:
    """What was sealed; raises `AgentError`, which names it as `what`, where it cannot be made."""
    return unpickled(body, what, REMEDY)


class Setup(NamedTuple):
    """What a process needs to know, said first."""

    config: Config
    end_token_ids: tuple[int, ...]
    """The end-of-turn tokens that the model's generation config names."""
    route: TokenRoute
    """How the servers are asked for tokens."""
    log_level: int
    """What is less than this is not logged."""


class Begin(NamedTuple):
    """Run an attempt."""

    number: int
    member: bytes
    """A sealed `Member`."""
    attempt: int


class Cancel(NamedTuple):
    """Nobody waits for an attempt any more; it is still told when it has ended."""

    number: int


class NewWeights(NamedTuple):
    """The engines sample from this version now."""

    version: int


class Close(NamedTuple):
    """End."""


class Ready(NamedTuple):
    """Attempts may begin."""


class Failed(NamedTuple):
    """Something cannot be loaded; the process ends."""

    outcome: Outcome


class Ended(NamedTuple):
    """What came of an attempt: a trajectory, or what ends the run."""

    number: int
    outcome: bytes
    """A sealed `Outcome`."""


class Logged(NamedTuple):
    """A record of the log."""

    logger: str
    level: int
    text: str
