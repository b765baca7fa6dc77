"""An agent file holds exactly one agent; whatever is wrong with it is one clear sentence."""

import sys
import threading
from pathlib import Path
from textwrap import dedent

import pytest

from agentrl.config import DataConfig, RolloutConfig
from agentrl.data import load_examples
from agentrl.errors import UsageError
from agentrl.executors.base import AgentExecutor
from agentrl.plugin import Agent, load_agent

INSTANCE = """
import agentrl as rl

class Guess(rl.AgentInstance):
    def reset(self, example):
        return "guess"

    def step(self, action):
        return rl.StepResult(reward=1.0, done=True)
"""

EXECUTOR = """
import agentrl as rl

class Loop(rl.AgentExecutor):
    async def execute(self, example, llm):
        return llm.trajectory(None, reward=1.0, stop_reason=rl.StopReason.DONE)
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str, name: str = "agent_func.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))
        return path

    return write_file


def test_one_instance_class_is_the_agent(write):
    agent = load_agent(write(INSTANCE))
    assert agent.name == "Guess"
    assert agent.instance_class is agent.agent_class
    assert agent.examples is None
    assert not agent.needs_prompt


def test_one_executor_class_is_the_agent_and_is_built_and_told_the_settings(write):
    agent = load_agent(
        write(
            EXECUTOR
            + """
    def configure(self, rollout, data):
        self.settings = (rollout.max_turns, data.prompt_key)
"""
        )
    )
    executor = agent.make_executor(RolloutConfig(max_turns=3), DataConfig(prompt_key="q"))
    assert agent.instance_class is None
    assert isinstance(executor, AgentExecutor)
    assert executor.settings == (3, "q")


def test_an_executor_and_the_instance_class_that_it_names_are_one_agent(write):
    agent = load_agent(
        write(
            """
            import agentrl as rl

            class AgentInstance(rl.AgentInstance):
                pass

            class AgentExecutor(rl.AgentExecutor):
                def __init__(self):
                    self.instance_class = AgentInstance

                async def execute(self, example, llm): ...
            """
        )
    )
    assert agent.name == "AgentExecutor"


def test_imported_and_extended_classes_are_not_agents_of_their_own(write):
    write("import agentrl as rl\n\nclass Imported(rl.AgentInstance):\n    pass\n", "library.py")
    agent = load_agent(
        write(
            """
            from agentrl import AgentExecutor, AgentInstance
            from library import Imported

            class Base(AgentInstance):
                pass

            class Guess(Base):
                pass

            Alias = Guess
            """
        )
    )
    assert agent.name == "Guess"


def test_two_agents_are_named_with_their_lines(write):
    path = write(
        """\
        import agentrl as rl

        class One(rl.AgentInstance):
            pass

        class Two(rl.AgentExecutor):
            async def execute(self, example, llm): ...
        """
    )
    with pytest.raises(
        UsageError, match=r"holds 2 agents: One \(line 3\), Two \(line 6\); keep one"
    ):
        load_agent(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "holds no agent, no class: define one class"),
        ("class Guess:\n    pass\n", r"holds no agent, only the classes Guess \(line 1\)"),
        ("async def agent(example, client):\n    return 1.0\n", "not supported in this version"),
        ("def broken(:\n", r"not valid Python: .* at line 1 \(def broken\(:\)"),
        ("x = '\0'\n", "not valid Python|cannot read"),
        ("\nimport no_such_package.inner\n", "needs the package 'no_such_package'"),
        ("\nfrom os import nothing_there\n", "ImportError: .* at line 2"),
        ("\n\nx = 1 / 0\n", r"ZeroDivisionError: division by zero at line 3 \(x = 1 / 0\)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 at line 2"),
    ],
)
def test_a_broken_file_is_one_clear_error(write, text, message):
    path = write(text)
    with pytest.raises(UsageError, match=message) as raised:
        load_agent(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_a_usage_error(tmp_path: Path):
    with pytest.raises(UsageError, match="does not exist: correct the path after --agent"):
        load_agent(tmp_path / "nowhere.py")


def test_an_executor_that_cannot_be_built_is_found_at_start(write):
    agent = load_agent(
        write(
            """\
            import agentrl as rl

            class Loop(rl.AgentExecutor):
                def __init__(self):
                    raise OSError("no display")

                async def execute(self, example, llm): ...
            """
        )
    )
    with pytest.raises(UsageError, match=r"building Loop .* OSError: no display at line 5"):
        agent.make_executor(RolloutConfig(), DataConfig())


def test_an_environment_that_cannot_be_built_is_found_at_start(write):
    text = INSTANCE + "\n    def __init__(self):\n        raise OSError('no display')\n"
    agent = load_agent(write(text))
    with pytest.raises(UsageError, match=r"building Guess .* OSError: no display at line 12 "):
        agent.make_executor(RolloutConfig(), DataConfig())


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_the_environment_built_as_a_probe_is_closed_also_from_a_running_loop(write, kind):
    text = (
        INSTANCE
        + f"""
    lives = []

    def __init__(self):
        self.lives.append("built")

    {kind} close(self):
        self.lives.append("closed")
"""
    )
    agent = load_agent(write(text))
    agent.make_executor(RolloutConfig(), DataConfig())
    assert agent.agent_class.lives == ["built", "closed"]


def test_a_probe_whose_close_swallows_its_cancellation_does_not_keep_the_start(write):
    text = (
        "import asyncio\n"
        + INSTANCE
        + """
    async def close(self):
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
"""
    )
    agent = load_agent(write(text))
    start = threading.Thread(
        target=agent.make_executor,
        args=(RolloutConfig(close_timeout=0.1), DataConfig()),
        daemon=True,
    )
    start.start()
    start.join(60)
    assert not start.is_alive()


def test_an_openrlhf_file_runs_with_its_import_line_changed(write):
    agent = load_agent(
        write(
            """
            from agentrl.executors.openrlhf import AgentInstanceBase, MultiTurnAgentExecutor

            class AgentInstance(AgentInstanceBase):
                def __init__(self, *args, **kwargs):
                    self.step_idx = 0

                async def reset(self, states, **kwargs):
                    return {"observation": states["observation"]}

                async def step(self, states, **kwargs):
                    return {"rewards": 1.0, "scores": 1.0, "environment_feedback": "", "done": True}

            class AgentExecutor(MultiTurnAgentExecutor):
                def __init__(self):
                    super().__init__(AgentInstance)
            """
        )
    )
    assert agent.name == "AgentExecutor"
    assert agent.needs_prompt
    assert [cls.__name__ for cls in agent.instance_classes] == ["AgentInstance"]
    assert isinstance(agent.make_executor(RolloutConfig(), DataConfig()), AgentExecutor)


def test_helpers_beside_the_file_are_found_also_later_and_do_not_mix(write, tmp_path: Path):
    agents = []
    for folder in ("one", "two"):
        write(f"name = {folder!r}\n", f"{folder}/helper_beside.py")
        write(f"name = {folder!r}\n", f"{folder}/lazy_{folder}.py")
        path = write(
            INSTANCE.replace('return "guess"', f"import lazy_{folder}; return lazy_{folder}.name")
            + "\nimport helper_beside\nNAME = helper_beside.name\n",
            f"{folder}/agent_func.py",
        )
        agents.append(load_agent(path))
    assert [sys.modules[agent.agent_class.__module__].NAME for agent in agents] == ["one", "two"]
    assert [agent.agent_class().reset({}) for agent in agents] == ["one", "two"]


def test_dataclasses_and_pickles_of_the_file_find_its_module(write):
    agent = load_agent(
        write(
            INSTANCE
            + """
import dataclasses, pickle
@dataclasses.dataclass
class State:
    value: "int" = 3

def examples(split):
    return [{"state": pickle.loads(pickle.dumps(State()))}]
"""
        )
    )
    assert agent.examples("train")[0]["state"].value == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("examples = 3", "must be a plain function"),
        ("async def examples(split): ...", "must be a plain function"),
        ("def examples(): ...", "must take one argument, the split"),
    ],
)
def test_examples_must_be_a_function_of_the_split(write, text, message):
    with pytest.raises(UsageError, match=message):
        load_agent(write(INSTANCE + text))


SINGLE_TURN = """\
    import agentrl as rl

    class Right(rl.SingleTurnAgent):
        def reward(self, example, completion):
            return 1.0
    """


def prompt_of(agent: Agent, data: DataConfig, row: dict[str, str]) -> str:
    executor = agent.make_executor(RolloutConfig(), data)
    return executor.instance_class().reset(row)


def test_a_single_turn_agent_takes_the_prompt_from_the_field_that_the_run_names(write):
    agent = load_agent(write(SINGLE_TURN))
    row = {"prompt": "1", "question": "2"}
    assert prompt_of(agent, DataConfig(prompt_key="question"), row) == "2"
    # A run with other names does not change the file's class.
    assert prompt_of(agent, DataConfig(), row) == "1"


def test_a_single_turn_agents_own_field_counts_and_a_contradiction_is_refused(write):
    agent = load_agent(
        write(SINGLE_TURN.replace("def reward", "prompt_key = 'q'\n        def reward"))
    )
    assert agent.prompt_key(DataConfig()) == "q"
    assert prompt_of(agent, DataConfig(prompt_key="q"), {"q": "3"}) == "3"
    with pytest.raises(
        UsageError, match=r"data\.prompt_key is 'x', but Right sets prompt_key to 'q'"
    ):
        agent.make_executor(RolloutConfig(), DataConfig(prompt_key="x"))


def test_rows_of_a_single_turn_agent_are_looked_at_unless_it_writes_the_prompt(write, tmp_path):
    data = DataConfig(path=str(tmp_path / "data.jsonl"))
    (tmp_path / "data.jsonl").write_text('{"question": "2"}\n')
    with pytest.raises(UsageError, match=r"row 0 .* has no 'prompt'.*set data\.prompt_key"):
        load_examples(data, load_agent(write(SINGLE_TURN)))
    own = "def reset(self, example):\n            return 'go'\n\n        def reward"
    assert len(load_examples(data, load_agent(write(SINGLE_TURN.replace("def reward", own))))) == 1
