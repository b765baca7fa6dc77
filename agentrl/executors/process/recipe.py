"""What another process needs to know to build an agent's instances, as text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.config import DataConfig, RolloutConfig
from agentrl.executors.base import AgentInstance

__all__ = ["Recipe"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The agent's file, and the settings that its executor takes, as JSON."""

    agent: str
    rollout: str
    data: str

    @classmethod
    def of(cls, agent: Path, rollout: RolloutConfig, data: DataConfig) -> Recipe:
        """Write down what `load` is to read."""
        return cls(str(agent), rollout.model_dump_json(), data.model_dump_json())

    def load(self) -> type[AgentInstance]:
        """Load the file and find the class of its instances as a run does.

        Raises:
            UsageError: the file cannot be loaded here.
        """
        from agentrl.executors.multi_turn import MultiTurnExecutor
        from agentrl.plugin import load_agent

        rollout = RolloutConfig.model_validate_json(self.rollout)
        # Instances live where this is called: no further process is to be made for them.
        rollout = rollout.model_copy(update={"env_backend": "thread"})
        executor = load_agent(Path(self.agent)).make_executor(
            rollout, DataConfig.model_validate_json(self.data), probe=False
        )
        assert isinstance(executor, MultiTurnExecutor), "only those have a host"
        return executor.instance_class
