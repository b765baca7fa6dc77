"""A run ends, whatever the code that it ran leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from textwrap import dedent

import pytest

from agentrl import event_loop

STUBBORN = """
import asyncio, logging, sys, threading, time
from agentrl import event_loop

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
"""


def start(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STUBBORN + dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_value_and_the_exception_of_main_come_back() -> None:
    async def value() -> int:
        return 7

    async def fails() -> None:
        raise KeyError("board")

    assert event_loop.run(value()) == 7
    with pytest.raises(KeyError, match="board"):
        event_loop.run(fails())


def test_what_is_left_is_cancelled_and_may_clean_up() -> None:
    closed = []

    async def left() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            closed.append("task")

    async def numbers():
        try:
            yield 1
        finally:
            closed.append("generator")

    async def main() -> None:
        task = asyncio.create_task(left())
        generator = numbers()
        await anext(generator)
        await asyncio.sleep(0)
        closed.extend([] if task and generator else ["never"])

    event_loop.run(main())
    assert sorted(closed) == ["generator", "task"]


def test_calls_in_threads_return_their_values_in_as_many_threads_as_there_are_calls() -> None:
    together = threading.Barrier(3, timeout=30)

    def call(number: int) -> int:
        together.wait()
        return number

    async def main() -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(call, number) for number in range(3)))

    assert event_loop.run(main()) == [0, 1, 2]


def test_more_calls_than_threads_all_run_and_raise_what_they_raise() -> None:
    def call(number: int) -> int:
        return 1 // number

    async def main() -> list[object]:
        calls = (asyncio.to_thread(call, number % 2) for number in range(200))
        return await asyncio.gather(*calls, return_exceptions=True)

    results = event_loop.run(main())
    assert [type(result) for result in results] == [ZeroDivisionError, int] * 100


def test_a_task_that_swallows_its_cancellation_is_named_and_does_not_keep_the_process() -> None:
    process = start(
        """
        async def main():
            async def episode():
                await stubborn()

            asyncio.create_task(episode(), name="episode 7")
            await asyncio.sleep(0)
            return "done"

        print(event_loop.run(main(), grace=0.1))
        """
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done\n"), err
    (line,) = err.splitlines()
    assert line.startswith("1 tasks went on for 0.1 s after they were cancelled")
    # Where it waits, not where its task began.
    assert "(episode 7 at <string>:8)" in line


def test_a_call_that_hangs_in_a_thread_does_not_keep_the_process() -> None:
    process = start(
        """
        async def main():
            asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)

        event_loop.run(main(), grace=0.1)
        """
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "1 calls in threads (asyncio.to_thread) did not return within 0.1 s" in err


def test_a_second_ctrl_c_ends_a_main_that_swallows_the_first() -> None:
    process = start(
        """
        async def main():
            print("ready", flush=True)
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    print("swallowed", flush=True)

        try:
            event_loop.run(main(), grace=0.1)
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    assert process.stdout is not None
    for expected in ("ready\n", "swallowed\n"):
        assert process.stdout.readline() == expected
        os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.splitlines()[-1]) == (0, "interrupted"), err
