"""agentrl trains language-model agents over many turns with reinforcement learning.

An agent file imports what it needs from here. Importing this package does not import torch.
"""

from agentrl.errors import AgentError, AgentRLError, EngineError, UsageError
from agentrl.executors.base import AgentExecutor, AgentInstance
from agentrl.executors.single_turn import SingleTurnAgent
from agentrl.executors.tools import ToolAgent, ToolError
from agentrl.types import (
    Action,
    Example,
    Generation,
    Message,
    Observation,
    SamplingParams,
    Sequence,
    StepResult,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)

__all__ = [
    "Action",
    "AgentError",
    "AgentExecutor",
    "AgentInstance",
    "AgentRLError",
    "EngineError",
    "Example",
    "Generation",
    "Message",
    "Observation",
    "SamplingParams",
    "Sequence",
    "SingleTurnAgent",
    "StepResult",
    "StopReason",
    "ToolAgent",
    "ToolCall",
    "ToolError",
    "Trajectory",
    "Turn",
    "UsageError",
]

__version__ = "0.1.0"
