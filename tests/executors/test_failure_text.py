"""A failure is shown by the lines that its user can correct."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

import agentrl
from agentrl.executors.failure_text import shorten

PACKAGE = Path(agentrl.__file__).parent
STDLIB = Path(asyncio.__file__).parent


def frame(file: object, line: int, function: str, code: str) -> str:
    return f'  File "{file}", line {line}, in {function}\n    {code}\n    ^^^^^\n'


OURS = frame(PACKAGE / "executors" / "scheduler.py", 190, "_episode", "await execute()")
STEP = frame("/home/me/agent.py", 7, "step", "self.board[9]")
LIBRARY = frame(STDLIB / "tasks.py", 5, "wait_for", "await fut")
HEAD = "Traceback (most recent call last):\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


def test_of_one_exception_the_users_frames_and_all_of_its_message_are_left() -> None:
    error = HEAD + OURS + LIBRARY + STEP + OURS + LIBRARY + "KeyError: 'two\n  lines'\n"
    assert shorten(error) == STEP + LIBRARY + "KeyError: 'two\n  lines'"


def test_a_failure_without_any_code_of_the_users_is_its_exception() -> None:
    server = HEAD + OURS + LIBRARY + "ConnectError: refused\n"
    engine = HEAD + OURS + "agentrl.errors.EngineError: the server is gone\n"
    assert shorten(server + CAUSE + engine) == "agentrl.errors.EngineError: the server is gone"


def test_of_a_chain_the_users_part_is_left_with_what_joins_it() -> None:
    first = HEAD + STEP + "KeyError: 9\n"
    second = HEAD + OURS + STEP + "ValueError: no such field\n"
    assert shorten(first + CAUSE + second) == (
        STEP + "KeyError: 9\n" + CAUSE + STEP + "ValueError: no such field"
    )


def test_what_stands_before_a_traceback_stays_and_other_text_is_left_alone() -> None:
    assert shorten("timed out\n" + HEAD + OURS + STEP + "CancelledError\n") == (
        "timed out\n" + STEP + "CancelledError"
    )
    assert shorten("no traceback\n  File at all") == "no traceback\n  File at all"


def test_a_real_traceback_through_agentrl_names_this_file_only() -> None:
    from agentrl.executors.normalize import as_number

    try:
        as_number("seven", "reward")
    except agentrl.AgentError:
        text = shorten(traceback.format_exc())
    assert text.count("  File ") == 1
    assert f'File "{__file__}"' in text
    assert text.splitlines()[-1].startswith("agentrl.errors.AgentError: the agent's reward is")
