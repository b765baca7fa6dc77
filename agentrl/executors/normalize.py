"""Plain values that agents return, as `Observation` and `StepResult`.

Accepted are the types themselves, str and lists of messages, Gymnasium's tuples, and dicts with the
keys that OpenRLHF's agent functions use. Everything else is an `AgentError` that says what came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from agentrl.errors import AgentError
from agentrl.types import Observation, SamplingParams, StepResult

__all__ = ["as_number", "as_observation", "as_step_result"]

_STEP_KEYS = {
    "observation": "observation",
    "environment_feedback": "observation",
    "reward": "reward",
    "rewards": "reward",
    "score": "score",
    "scores": "score",
    "done": "done",
    "sampling": "sampling",
    "sampling_params": "sampling",
    "metrics": "metrics",
    "extra_logs": "metrics",
}


def as_number(value: Any, name: str) -> float:
    """A float of a number, or of a numpy or torch value with one element.

    Raises:
        AgentError: it is no such thing, or not finite.
    """
    try:
        item = value.item() if hasattr(value, "item") else value
        if isinstance(item, str):
            raise TypeError("a str, even one of digits, is no number")
        number = float(item)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise AgentError(
            f"the agent's {name} is {value!r}, which is not one number: return a float or None"
        ) from error
    if not math.isfinite(number):
        raise AgentError(f"the agent's {name} is {number}: return a finite number or None")
    return number


def as_observation(value: Any, said: str = "reset returned") -> Observation:
    """The first observation out of what `reset` returned, or was given where `said` says.

    Raises:
        AgentError: it cannot be read as one.
    """
    match value:
        case ({"role": _}, {"role": _}):
            pass  # two messages
        case (observation, Mapping()) if isinstance(value, tuple):
            value = observation
    if isinstance(value, Mapping) and "role" not in value:
        if "observation" not in value:
            raise AgentError(
                f"{said} a dict with the keys {_names(value)}: it must have the key 'observation'"
            )
        value = value["observation"]
    return _observation(value, said)


def as_step_result(value: Any) -> StepResult:
    """The result out of what `step` returned.

    Raises:
        AgentError: it cannot be read as one.
    """
    match value:
        case StepResult():
            parts = {each.name: getattr(value, each.name) for each in fields(StepResult)}
        case Mapping():
            parts = _parts_of_dict(value)
        case (observation, reward, terminated, truncated, Mapping() as info):
            parts = {
                "observation": observation,
                "reward": reward,
                "done": bool(terminated) or bool(truncated),
                "metrics": {k: v for k, v in info.items() if isinstance(v, int | float)},
            }
        case _:
            raise AgentError(
                f"step returned a {type(value).__name__}: return a StepResult, "
                "(observation, reward, terminated, truncated, info), or a dict"
            )
    return _step_result(parts)


def _parts_of_dict(value: Mapping[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for key, item in value.items():
        field = _STEP_KEYS.get(key)
        if field is None:
            raise AgentError(
                f"step returned a dict with the key {key!r}, which means nothing: use "
                f"{', '.join(_STEP_KEYS)}"
            )
        if field in parts and item is not None and parts[field] is not None:
            raise AgentError(f"step returned a dict with two keys for {field}: keep one of them")
        if key == "environment_feedback" and isinstance(item, str):
            # OpenRLHF's feedback carries the template's marks itself.
            item = Observation(item, raw=True)
        if parts.get(field) is None:
            parts[field] = item
    return parts


def _step_result(parts: Mapping[str, Any]) -> StepResult:
    done = bool(parts.get("done", False))
    observation = parts.get("observation")
    if observation is not None and not (done and observation == ""):
        observation = _observation(observation, "step returned")
    elif not done:
        raise AgentError("a step that is not done must return an observation for the next turn")
    else:
        observation = None
    reward, score = parts.get("reward"), parts.get("score")
    metrics = parts.get("metrics") or {}
    return StepResult(
        observation=observation,
        reward=None if reward is None else as_number(reward, "reward"),
        done=done,
        score=None if score is None else as_number(score, "score"),
        metrics={str(name): as_number(item, f"metric {name}") for name, item in metrics.items()},
        sampling=_sampling(parts.get("sampling")),
    )


def _observation(value: Any, said: str) -> Observation:
    match value:
        case Observation():
            return value
        case str():
            return Observation(value)
        case Mapping() if "role" in value:
            return Observation([dict(value)])
        case list() | tuple() if all(isinstance(message, Mapping) for message in value):
            return Observation(list(value))
        case _:
            raise AgentError(
                f"{said} {value!r} as the observation, which must be a str, a list of messages, or "
                "an Observation"
            )


def _sampling(value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {}
        case SamplingParams():
            return {each.name: getattr(value, each.name) for each in fields(SamplingParams)}
        case Mapping():
            return dict(value)
        case _:
            raise AgentError(
                f"step returned sampling parameters of type {type(value).__name__}: return a dict "
                "with fields of SamplingParams"
            )


def _names(value: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, value)) or "(none)"
