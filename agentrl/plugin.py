"""Loads a user's agent file: one file, one agent.

The agent is the one `AgentExecutor` or `AgentInstance` class that the file itself defines; bases
that it imports, and instance classes that its executor uses, are not agents of their own. Whatever
is wrong with the file becomes one `UsageError` that names the line to look at.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from agentrl import event_loop
from agentrl.config import DataConfig, RolloutConfig
from agentrl.errors import AgentRLError, UsageError
from agentrl.executors.base import AgentExecutor, AgentInstance

if TYPE_CHECKING:
    from agentrl.executors.multi_turn import MultiTurnExecutor
    from agentrl.executors.process.places import EnvHost

__all__ = ["Agent", "blame_user_code", "load_agent"]

AgentClass = type[AgentExecutor] | type[AgentInstance]


@dataclass(frozen=True, slots=True)
class Agent:
    """What a file holds: one agent class and, if defined, `examples(split)`.

    `instance_classes` are all environments that the file defines: the agent itself, or those that
    its executor uses.
    """

    name: str
    path: Path
    agent_class: AgentClass
    examples: Callable[[str], Any] | None = None
    instance_classes: tuple[type[AgentInstance], ...] = ()

    @property
    def instance_class(self) -> type[AgentInstance] | None:
        """The environment, unless the agent is an executor with a loop of its own."""
        return self.agent_class if issubclass(self.agent_class, AgentInstance) else None

    @property
    def needs_prompt(self) -> bool:
        """True where the agent takes its first message from the row (`data.prompt_key`)."""
        return bool(getattr(self.agent_class, "needs_prompt", False))

    def prompt_key(self, data: DataConfig) -> str | None:
        """The field that every row must have; None where the agent writes its first message.

        Raises:
            UsageError: the class and `data.prompt_key` name different fields.
        """
        if not self.needs_prompt:
            return None
        default = DataConfig().prompt_key
        own = getattr(self.agent_class, "prompt_key", default)
        if own == default:
            return data.prompt_key
        if data.prompt_key not in (default, own):
            raise UsageError(
                f"data.prompt_key is {data.prompt_key!r}, but {self.name} sets prompt_key to "
                f"{own!r}: remove one of them"
            )
        return str(own)

    def make_executor(
        self, rollout: RolloutConfig, data: DataConfig, *, probe: bool = True
    ) -> AgentExecutor:
        """Build what runs the episodes, with the run's settings.

        Args:
            rollout: limits of an episode.
            data: names of the row's fields.
            probe: build one environment and close it, so that a constructor that raises is found
                before the first episode.

        Raises:
            UsageError: a constructor of the user's raised, or wants arguments.
            AgentTimeoutError: the environment was not built within `rollout.reset_timeout`.
        """
        from agentrl.executors.multi_turn import MultiTurnExecutor

        if issubclass(self.agent_class, AgentInstance):
            executor: AgentExecutor = MultiTurnExecutor(self._instance_class(data), rollout)
        else:
            with blame_user_code(self.path, f"building {self.name}"):
                executor = self.agent_class()
                executor.configure(rollout, data)
        if rollout.env_backend != "thread":
            if not isinstance(executor, MultiTurnExecutor):
                raise UsageError(
                    f"rollout.env_backend {rollout.env_backend} is for environments, and "
                    f"{self.name} in {self.path} is the whole loop of an episode: set it to thread"
                )
            executor.host = self._make_host(rollout, data)
        if probe and isinstance(executor, MultiTurnExecutor):
            instance_class = executor.instance_class
            with (
                blame_user_code(self.path, f"building {instance_class.__name__}"),
                # A thread of its own, because the caller may be on an event loop already.
                ThreadPoolExecutor(1) as thread,
            ):
                thread.submit(event_loop.run, _build_and_close(executor)).result()
        return executor

    def _make_host(self, rollout: RolloutConfig, data: DataConfig) -> EnvHost:
        """What makes the processes of environments."""
        from agentrl.executors.process.host import ProcessHost
        from agentrl.executors.process.ray_host import RayHost
        from agentrl.executors.process.recipe import Recipe

        recipe = Recipe.of(self.path, rollout, data)
        return RayHost(recipe) if rollout.env_backend == "ray" else ProcessHost(recipe)

    def _instance_class(self, data: DataConfig) -> type[AgentInstance]:
        """The environment, reading the prompt where this run has it."""
        assert issubclass(self.agent_class, AgentInstance)
        key = self.prompt_key(data)
        if key is None or getattr(self.agent_class, "prompt_key", key) == key:
            return self.agent_class
        # A class of this run's own: the file's may serve another run with other names.
        names = {"prompt_key": key, "__module__": self.agent_class.__module__}
        return type(self.name, (self.agent_class,), names)


async def _build_and_close(executor: MultiTurnExecutor) -> None:
    runner = executor.runner("probe")
    try:
        await runner.build()
    finally:
        await runner.close()
        await executor.close()


def load_agent(path: Path) -> Agent:
    """Load the one agent of a file.

    While the file runs, its folder comes first in `sys.path`, so that it can import modules
    beside it; later imports (inside `step`, say) still find them, after everything else.

    Raises:
        UsageError: no such file, a syntax error, a missing package, an error while it was
            imported, no agent, or more than one.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"agent file {path} does not exist: correct the path after --agent")
    tree = _parse(path)
    module = _import(path)
    classes = _own_classes(module)
    agent_class = _find_agent(classes, tree, path)
    instances = tuple(cls for cls in classes if issubclass(cls, AgentInstance))
    return Agent(agent_class.__name__, path, agent_class, _find_examples(module, path), instances)


@contextmanager
def blame_user_code(path: Path, doing: str) -> Iterator[None]:
    """Turn what the user's code raises into one `UsageError` with the line of the file in it."""
    try:
        yield
    except AgentRLError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame for frame in frames if frame.filename == str(path)]
        where = f" at line {lines[-1].lineno} ({lines[-1].line})" if lines else ""
        raise UsageError(
            f"{doing} from {path} raised {type(error).__name__}: {error}{where}: correct the file"
        ) from error


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise UsageError(
            f"agent file {path} is not valid Python: {error.msg} at line {error.lineno} "
            f"({(error.text or '').strip()})"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the agent file {path}: {error}") from error


def _import(path: Path) -> ModuleType:
    """Run the file as a module of its own; `sys.modules` knows it, as dataclasses need.

    Its name holds the folder too, since agent files like to have the same name.
    """
    name = f"agentrl_agent_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        with _folder_importable(path.parent), blame_user_code(path, "importing the agent"):
            exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except UsageError as error:
        del sys.modules[name]
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name is not None:
            package = cause.name.partition(".")[0]
            raise UsageError(
                f"agent file {path} needs the package {package!r}, which is not installed "
                f"({cause}): install it in this environment"
            ) from cause
        raise
    return module


_folder_of_helper: dict[str, Path] = {}
"""Modules that agent files imported from beside them, and the folder each came from."""


@contextmanager
def _folder_importable(folder: Path) -> Iterator[None]:
    """Put `folder` first in `sys.path`, and last when the file has run."""
    for name, home in list(_folder_of_helper.items()):
        # The helper of an agent file loaded before must not answer for one of the same name here.
        if home != folder and (folder / f"{name}.py").is_file():
            sys.modules.pop(name, None)
            del _folder_of_helper[name]
    known = set(sys.modules)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
    try:
        yield
    finally:
        sys.path[:] = [*(entry for entry in sys.path if entry != str(folder)), str(folder)]
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).parent == folder:
                _folder_of_helper[name] = folder


def _find_agent(classes: list[AgentClass], tree: ast.Module, path: Path) -> AgentClass:
    definitions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = classes
    executors = [cls for cls in found if issubclass(cls, AgentExecutor)]
    if len(executors) == 1:
        used = _names_in(definitions.get(executors[0].__name__))
        found = [cls for cls in found if cls is executors[0] or cls.__name__ not in used]
    lines = [
        f"{cls.__name__} (line {definitions[cls.__name__].lineno})"
        if cls.__name__ in definitions
        else cls.__name__
        for cls in found
    ]
    function = _client_agent(tree)
    if function is not None:
        lines.append(f"agent (line {function.lineno})")
    if len(lines) > 1:
        raise UsageError(
            f"agent file {path} holds {len(lines)} agents: {', '.join(lines)}; keep one, and move "
            "the others to files of their own"
        )
    if function is not None:
        raise UsageError(
            f"agent file {path} defines the function agent at line {function.lineno}: agents that "
            "are given an OpenAI client are not supported in this version; write an AgentInstance "
            "or an AgentExecutor"
        )
    if not found:
        raise UsageError(_describe_nothing(definitions, path))
    return found[0]


def _own_classes(module: ModuleType) -> list[AgentClass]:
    """Concrete agent classes that the file defines, without those that others there extend."""
    classes: list[AgentClass] = []
    for value in vars(module).values():
        if (
            inspect.isclass(value)
            and issubclass(value, AgentExecutor | AgentInstance)
            and value.__module__ == module.__name__
            and not inspect.isabstract(value)
            and value not in classes
        ):
            classes.append(value)
    return [
        cls
        for cls in classes
        if not any(cls is not other and issubclass(other, cls) for other in classes)
    ]


def _names_in(definition: ast.ClassDef | None) -> set[str]:
    if definition is None:
        return set()
    return {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}


def _client_agent(tree: ast.Module) -> ast.AsyncFunctionDef | None:
    """`async def agent(example, client)` at the top of the file."""
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "agent":
            return node
    return None


def _describe_nothing(definitions: dict[str, ast.ClassDef], path: Path) -> str:
    classes = ", ".join(f"{name} (line {node.lineno})" for name, node in definitions.items())
    found = f"only the classes {classes}" if classes else "no class"
    return (
        f"agent file {path} holds no agent, {found}: define one class that extends "
        "agentrl.AgentInstance or agentrl.AgentExecutor"
    )


def _find_examples(module: ModuleType, path: Path) -> Callable[[str], Any] | None:
    examples = getattr(module, "examples", None)
    if examples is None:
        return None
    if not callable(examples) or inspect.iscoroutinefunction(examples):
        raise UsageError(
            f"`examples` in {path} must be a plain function of the split: "
            "def examples(split): return [...]"
        )
    try:
        inspect.signature(examples).bind("train")
    except TypeError as error:
        raise UsageError(
            f"`examples` in {path} must take one argument, the split ({error})"
        ) from error
    function: Callable[[str], Any] = examples
    return function
