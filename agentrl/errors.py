"""The exceptions of agentrl. Each message names a cause and a remedy.

`UsageError` is something the user can mend before anything runs (exit status 2);
every other `AgentRLError` is a failure of the run itself (exit status 1).
"""

__all__ = [
    "AgentError",
    "AgentRLError",
    "AgentTimeoutError",
    "ContextOverflowError",
    "DependencyError",
    "EngineError",
    "SaveError",
    "TrainingError",
    "UsageError",
]


class AgentRLError(Exception):
    """Base of everything that agentrl raises on purpose. Exit status 1."""

    exit_status = 1


class UsageError(AgentRLError):
    """A wrong flag, file, agent or data set: known before the run starts. Exit status 2."""

    exit_status = 2


class DependencyError(UsageError):
    """An optional package is not installed; the message names the extra to install."""


class AgentError(AgentRLError):
    """The user's agent broke its contract (returned something unusable, hung, raised)."""


class AgentTimeoutError(AgentError):
    """The user's reset or step did not return within its time limit."""


class EngineError(AgentRLError):
    """The rollout engine failed: an infrastructure fault, never a reward."""


class ContextOverflowError(EngineError):
    """A request does not fit the engine's context; the caller should have counted first."""


class SaveError(AgentRLError):
    """A checkpoint or model could not be written; what was saved before is untouched."""


class TrainingError(AgentRLError):
    """The learner cannot go on from its weights; the last checkpoint is untouched."""
