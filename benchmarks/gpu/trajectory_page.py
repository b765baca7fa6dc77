"""A page of text with the same questions before and after training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.types import Trajectory

__all__ = ["trajectory_page"]


def trajectory_page(
    before: Sequence[Trajectory], after: Sequence[Trajectory], examples: int
) -> str:
    """What the policy did with the first questions, from the question on.

    Args:
        before, after: evaluations of the same examples.
        examples: how many to show.
    """
    later = {trajectory.example_id: trajectory for trajectory in after}
    shown = [trajectory for trajectory in before if trajectory.example_id in later][:examples]
    lines = []
    for first in shown:
        for when, trajectory in (("before", first), ("after", later[first.example_id])):
            reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
            lines.append(
                f"--- {trajectory.example_id}, {when} training: reward {reward}, "
                f"{trajectory.stop_reason}"
            )
            lines += [_line(message) for message in _since_question(trajectory.messages)]
        lines.append("")
    return "\n".join(lines)


def _since_question(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    asked = [i for i, message in enumerate(messages) if _is_question(message)]
    return messages[asked[-1] :] if asked else messages


def _is_question(message: Mapping[str, Any]) -> bool:
    return message["role"] == "user" and str(message["content"]).startswith("What is")


def _line(message: Mapping[str, Any]) -> str:
    parts = [str(message.get("content") or "")]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        parts.append(f"{function['name']}({json.dumps(function['arguments'])})")
    text = " ".join(" ".join(parts).split())
    return f"{message['role']:>10}: {text}"
