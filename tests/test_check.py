"""`agentrl check` names what is wrong with an agent file, and only that."""

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path
from textwrap import dedent, indent

import pytest
from rich.console import Console

from agentrl import event_loop
from agentrl.check import Report, check_agent
from agentrl.check.watched_loop import WatchedLoop
from agentrl.config import Config, DataConfig, EngineConfig, ModelConfig, RolloutConfig
from agentrl.errors import UsageError

HEAD = """
import asyncio, time
import agentrl as rl

def examples(split):
    return [{"id": number} for number in range(3)]

"""
GOOD_RESET = 'def reset(self, example):\n    return "say something"\n'
GOOD_STEP = """\
def step(self, action):
    if action.turn_index == 1:
        return rl.StepResult(reward=1.0, done=True)
    return rl.StepResult("go on", reward=0.0)
"""


def instance(reset: str = GOOD_RESET, step: str = GOOD_STEP, rest: str = "") -> str:
    body = "\n".join(dedent(part) for part in (reset, step, rest))
    return HEAD + "class Agent(rl.AgentInstance):\n" + indent(body, "    ")


def check(tmp_path: Path, text: str, **rollout) -> Report:
    path = tmp_path / "agent_func.py"
    path.write_text(text)
    limits = {"reset_timeout": 0.5, "step_timeout": 0.5, "close_timeout": 0.5, "max_turns": 4}
    return check_agent(path, Config(agent=path, rollout=RolloutConfig(**(limits | rollout))))


def of(report: Report, subject: str) -> list[tuple[str, str]]:
    return [
        (finding.level, finding.message)
        for finding in report.findings
        if finding.subject == subject
    ]


def wrong(report: Report) -> set[tuple[str, str]]:
    return {(f.level, f.subject) for f in report.findings if f.level != "ok"}


@pytest.mark.parametrize("method", ["def", "async def"])
def test_a_good_agent_has_no_complaint_and_every_subject_is_looked_at(tmp_path, method):
    reset, step, close = (
        text.replace("def", method, 1) for text in (GOOD_RESET, GOOD_STEP, "def close(self): ...\n")
    )
    text = instance(reset, step, close)
    report = check(tmp_path, text)
    assert wrong(report) == set()
    assert report.ok
    subjects = [finding.subject for finding in report.findings]
    assert subjects == ["template", "reset", "step", "reward", "ending", "close", "tokens"]
    assert of(report, "reset") == [("ok", "returned str (6 times)")]
    assert of(report, "close") == [("ok", "ran once for each of 6 environments")]


def test_a_raising_step_is_shown_once_with_its_traceback(tmp_path):
    report = check(tmp_path, instance(step="def step(self, action):\n    return {}['board']\n"))
    (finding,) = [finding for finding in report.findings if finding.subject == "failure"]
    assert finding.level == "error"
    assert "KeyError: 'board'" in finding.message
    assert "agent_func.py" in finding.detail
    assert not report.ok


def test_a_raising_constructor_is_an_error(tmp_path):
    report = check(
        tmp_path, instance(rest="def __init__(self):\n    raise OSError('no display')\n")
    )
    assert "no display" in of(report, "failure")[0][1]


def test_a_hanging_plain_step_is_named_with_its_call_and_its_limit(tmp_path):
    log = tmp_path / "calls.txt"
    step = f"""\
    def step(self, action):
        with open({str(log)!r}, "a") as calls:
            calls.write("step ")
        time.sleep(30)
    """
    report = check(tmp_path, instance(step=step), step_timeout=0.2)
    ((level, message),) = of(report, "hanging")
    assert level == "error"
    assert "call 1 of step" in message
    assert "0.2 s" in message
    # The two episodes of the first example; the other examples would only hang again.
    assert log.read_text() == "step step "


def test_a_hanging_coroutine_is_named_too(tmp_path):
    reset = "async def reset(self, example):\n    await asyncio.Event().wait()\n"
    ((level, message),) = of(check(tmp_path, instance(reset), reset_timeout=0.2), "hanging")
    assert level == "error"
    assert "reset" in message


def test_a_coroutine_that_never_gives_the_loop_back_is_given_up_with_its_line(tmp_path):
    step = "async def step(self, action):\n    time.sleep(30)\n"
    report = check(tmp_path, instance(step=step), step_timeout=0.5)
    ((level, message),) = of(report, "blocking")
    assert level == "error"
    assert "time.sleep(30)" in message
    assert "agent_func.py" in message


def test_a_coroutine_that_blocks_for_a_while_holds_all_other_episodes(tmp_path):
    step = GOOD_STEP.replace(
        "def step(self, action):", "async def step(self, action):\n    time.sleep(0.4)"
    )
    report = check(tmp_path, instance(step=step), step_timeout=5)
    ((level, message),) = of(report, "blocking")
    assert level == "error"
    assert "async def step held the event loop" in message


def test_a_plain_step_that_blocks_is_no_fault(tmp_path):
    step = GOOD_STEP.replace(
        "def step(self, action):", "def step(self, action):\n    time.sleep(0.4)"
    )
    assert wrong(check(tmp_path, instance(step=step), step_timeout=5)) == set()


def test_a_reward_that_is_not_finite_is_an_error(tmp_path):
    step = "def step(self, action):\n    return {'reward': float('nan'), 'done': True}\n"
    report = check(tmp_path, instance(step=step))
    assert "nan" in of(report, "failure")[0][1]


def test_no_reward_at_all_is_an_error_and_some_missing_ones_a_warning(tmp_path):
    never = "def step(self, action):\n    return rl.StepResult(done=True)\n"
    assert of(check(tmp_path, instance(step=never)), "reward") == [
        ("error", "none of 6 episodes had a reward")
    ]
    some = (
        "def step(self, action):\n"
        "    return rl.StepResult(done=True, reward=None if self.id else 1.0)\n"
    )
    reset = "def reset(self, example):\n    self.id = example['id']\n    return 'go'\n"
    assert of(check(tmp_path, instance(reset, some)), "reward") == [
        ("warning", "4 of 6 episodes had no reward")
    ]


def test_closing_oneself_is_an_error(tmp_path):
    step = """\
    def step(self, action):
        self.close()
        return rl.StepResult(reward=1.0, done=True)
    """
    report = check(tmp_path, instance(step=step, rest="def close(self): ...\n"))
    ((level, message),) = of(report, "close")
    assert level == "error"
    assert "close ran 2 times" in message


def test_a_raising_close_is_an_error(tmp_path):
    rest = "def close(self):\n    raise OSError('already gone')\n"
    assert ("error", "close raised an exception") in of(
        check(tmp_path, instance(rest=rest)), "close"
    )


@pytest.mark.parametrize(
    "rest",
    [
        "def close(self):\n    time.sleep(60)\n",
        "async def close(self):\n    import asyncio\n    await asyncio.sleep(60)\n",
    ],
)
def test_a_hanging_close_is_named_as_such(tmp_path, rest):
    report = check(tmp_path, instance(rest=rest), close_timeout=0.2)
    ((level, message),) = of(report, "close")
    assert level == "error"
    assert "close did not return within rollout.close_timeout" in message


def test_an_executor_that_forgets_to_close_its_environment_is_an_error(tmp_path):
    text = (
        instance(rest="def close(self): ...\n")
        + """

class Loop(rl.AgentExecutor):
    async def execute(self, example, llm):
        environment = Agent()
        environment.reset(example)
        return llm.trajectory(None, reward=1.0, stop_reason=rl.StopReason.DONE)
"""
    )
    report = check(tmp_path, text)
    assert of(report, "close") == [("error", "6 of 6 environments were not closed")]


def test_an_episode_that_never_ends_is_a_warning(tmp_path):
    step = "def step(self, action):\n    return rl.StepResult('again', reward=0.0)\n"
    ((level, message),) = of(check(tmp_path, instance(step=step)), "ending")
    assert level == "warning"
    assert "rollout.max_turns (4)" in message


def test_episodes_that_all_run_out_of_tokens_are_a_warning(tmp_path):
    step = "def step(self, action):\n    return rl.StepResult('again ' * 200, reward=0.0)\n"
    report = check(tmp_path, instance(step=step), max_tokens=300, max_new_tokens=100)
    ((level, message),) = of(report, "ending")
    assert level == "warning"
    assert "a token limit: max_tokens (6 times)" in message


def test_turns_that_are_not_in_the_trajectory_are_a_warning(tmp_path):
    text = (
        HEAD
        + """
class Loop(rl.AgentExecutor):
    async def execute(self, example, llm):
        await llm.generate([10, 11])
        conversation = llm.conversation(rl.Observation("go"))
        conversation.take(await llm.generate(conversation.token_ids))
        return llm.trajectory(conversation, reward=1.0)
"""
    )
    ((level, message),) = of(check(tmp_path, text), "tokens")
    assert level == "warning"
    assert "called the engine 2 times and its trajectory holds 1 turns" in message


def test_a_sequence_over_the_budget_is_an_error(tmp_path):
    text = (
        HEAD
        + """
import numpy as np

class Loop(rl.AgentExecutor):
    async def execute(self, example, llm):
        generation = await llm.generate([10] * 90)
        length = 90 + len(generation.token_ids) + 90
        mask = np.zeros(length, bool)
        mask[90:-90] = True
        turn = rl.Turn(90, length - 90, generation.finish_reason)
        sequence = rl.Sequence(np.full(length, 10), mask, None, np.where(mask, 0, -1), (turn,))
        return rl.Trajectory((sequence,), 1.0, rl.StopReason.DONE)
"""
    )
    ((level, message),) = of(check(tmp_path, text, max_tokens=100, max_new_tokens=10), "tokens")
    assert level == "error"
    assert "rollout.max_tokens is 100" in message


def test_a_template_that_rewrites_history_is_a_warning(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{%- for message in messages -%}"
        "<|im_start|>{{ message.role }}\n"
        "{{ '' if message.role == 'assistant' and not loop.last else message.content }}"
        "<|im_end|>\n"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )
    path = tmp_path / "agent_func.py"
    path.write_text(instance())
    config = Config(agent=path, model=ModelConfig(chat_template=template))
    report = check_agent(path, config)
    ((level, message),) = of(report, "template")
    assert level == "warning"
    assert "rewrites history" in message


def test_values_of_different_kinds_are_a_warning(tmp_path):
    step = """\
    def step(self, action):
        if action.turn_index == 1:
            return {"reward": 1.0, "done": True}
        return rl.StepResult("go on")
    """
    ((level, message),) = of(check(tmp_path, instance(step=step)), "step")
    assert level == "warning"
    assert "dict with reward, done" in message
    assert "StepResult" in message


def test_the_first_answer_of_the_last_episode_is_cut_by_the_limit(tmp_path):
    step = """\
    def step(self, action):
        if action.finish_reason == "length":
            raise RuntimeError("cannot read half an answer")
        return rl.StepResult(reward=1.0, done=True)
    """
    report = check(tmp_path, instance(step=step))
    assert "cannot read half an answer" in of(report, "failure")[0][1]
    assert sum(level == "error" for level, _ in of(report, "failure")) == 1


def test_a_turn_that_nothing_ends_is_an_answer_and_as_long_as_was_asked_for(tmp_path):
    text = (
        HEAD
        + """
class Loop(rl.AgentExecutor):
    async def execute(self, example, llm):
        conversation = llm.conversation("say something")
        texts = []
        for count in (30, 40):
            generation = await llm.generate(
                conversation.token_ids, ignore_eos=True, max_new_tokens=count
            )
            assert len(generation.token_ids) == count, generation
            assert generation.finish_reason == "length", generation
            texts.append(conversation.take(generation).text)
        return llm.trajectory(conversation, reward=float("yes" in texts[1]))
"""
    )
    report = check(tmp_path, text)
    assert of(report, "failure") == []
    assert of(report, "reward") == [("ok", "from 1 to 1")]


def test_the_users_own_script_is_said(tmp_path):
    script = tmp_path / "script.txt"
    script.write_text("magic\n")
    step = """\
    def step(self, action):
        return rl.StepResult("no", reward=float(action.text == "magic"), done=True)
    """
    path = tmp_path / "agent_func.py"
    path.write_text(instance(step=step))
    engine = EngineConfig(kind="scripted", script=script)
    report = check_agent(path, Config(agent=path, engine=engine))
    assert of(report, "reward") == [("ok", "from 1 to 1")]


def test_the_classes_are_as_before_when_the_check_is_over(tmp_path):
    import sys

    check(tmp_path, instance())
    module = next(
        module
        for module in list(sys.modules.values())
        if getattr(module, "__file__", None) == str(tmp_path / "agent_func.py")
    )
    assert "close" not in vars(module.Agent)
    assert not hasattr(module.Agent.step, "__wrapped__")


def test_a_file_that_cannot_be_loaded_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="holds no agent"):
        check(tmp_path, "x = 1\n")
    path = tmp_path / "agent_func.py"
    path.write_text(instance().replace("def examples", "def no_examples"))
    with pytest.raises(UsageError, match="there are no examples"):
        check_agent(path, Config(agent=path, data=DataConfig()))


def test_the_report_reads_as_text_and_in_colour(tmp_path):
    report = check(tmp_path, instance(step="def step(self, action):\n    return {}['[red]']\n"))
    assert "KeyError: '[red]'" in str(report)
    assert str(report).splitlines()[-1] == "1 error, 0 warnings"
    console = Console(record=True, width=100)
    console.print(report)
    assert "KeyError: '[red]'" in console.export_text()


def test_stalls_of_a_loop_are_recorded_and_its_errors_are_raised(tmp_path):
    async def block() -> None:
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # noqa: ASYNC251 - what this is about
        await asyncio.sleep(0.05)
        raise KeyError("after")

    loop = WatchedLoop(min_stall=0.2, max_stall=10)
    with pytest.raises(KeyError):
        loop.run(block(), tmp_path)
    (stall,) = loop.stalls
    assert stall.seconds >= 0.28


def test_a_loop_whose_main_leaves_a_stubborn_task_behind_is_not_stuck(tmp_path, monkeypatch):
    monkeypatch.setattr(event_loop, "GRACE", 0.1)
    release = threading.Event()

    async def stubborn() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def main() -> None:
        tasks.append(asyncio.create_task(stubborn()))

    tasks: list[asyncio.Task[None]] = []
    assert WatchedLoop(min_stall=10, max_stall=0.5).run(main(), tmp_path) is None
    release.set()
