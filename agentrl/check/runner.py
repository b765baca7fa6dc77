"""Runs an agent file against a scripted engine.

The episodes go through the real stack (tokenizer, chat format, executor, scheduler), one at a time
and with short limits, so that what is slow or stuck can be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.chat import ChatFormat
from agentrl.check.findings import (
    judge_closing,
    judge_ending,
    judge_failures,
    judge_returns,
    judge_rewards,
    judge_stalls,
    judge_tokens,
)
from agentrl.check.observe import Observer
from agentrl.check.report import Finding, Report
from agentrl.check.script import CheckScript
from agentrl.check.watched_loop import WatchedLoop
from agentrl.config import Config, RolloutConfig
from agentrl.cursor import all_groups
from agentrl.data import load_examples
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import AgentError, EngineError
from agentrl.executors.groups import GroupRequest
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.load import load_tokenizer
from agentrl.plugin import Agent, load_agent
from agentrl.types import Observation, SamplingParams, StopReason, Trajectory

__all__ = ["check_agent"]

MAX_EXAMPLES = 4
SAMPLES_PER_EXAMPLE = 2
CALL_LIMIT = 10.0
"""Seconds that a check waits for one reset, step or close at most."""
MAX_STALL = 0.25
"""Seconds that a coroutine may hold the event loop; a busy machine makes shorter stalls."""
MAX_NEW_TOKENS = 256
"""Enough for the script's answers, and soon reached by the one that is to be cut."""


def check_agent(path: Path, config: Config) -> Report:
    """Run an agent against scripted answers and report what is wrong with it.

    Raises:
        UsageError: the file, its examples or the model's tokenizer cannot be loaded at all.
    """
    agent = load_agent(path)
    examples = load_examples(config.data, agent)
    groups = all_groups(examples, SAMPLES_PER_EXAMPLE, prefix="check-")[:MAX_EXAMPLES]
    check = _Check(agent, config, load_tokenizer(config.model), groups)
    return Report(f"{agent.name} ({agent.path})", tuple(check.findings()))


class _Check:
    """One check: what it saw, and what it makes of it."""

    def __init__(
        self, agent: Agent, config: Config, tokenizer: Any, groups: list[GroupRequest]
    ) -> None:
        self._agent = agent
        self._config = config
        self._chat = ChatFormat(
            tokenizer,
            history=config.rollout.history,
            tool_parser=config.rollout.tool_parser,
        )
        self._groups = groups
        self._rollout = _short_limits(config.rollout)
        self._observer = Observer()
        self._trajectories: list[Trajectory] = []
        self._engine = self._make_engine(tokenizer)
        limit = self._rollout.step_timeout
        self._loop = WatchedLoop(min_stall=MAX_STALL, max_stall=limit)

    def findings(self) -> list[Finding]:
        """Run the episodes and judge them."""
        with self._observer.watching(self._agent.instance_classes):
            stuck = self._loop.run(self._run(), self._agent.path)
        findings = [self._judge_template()]
        if stuck is not None:
            findings.append(
                Finding(
                    "error",
                    "blocking",
                    f"a coroutine has held the event loop for {self._rollout.step_timeout:g} s at "
                    f"{stuck}",
                    "write the method as a plain `def` (it then runs in a thread of its own), or "
                    "await; the check was given up here",
                )
            )
            return findings
        return [
            *findings,
            *judge_returns(self._observer),
            *judge_failures(self._trajectories, self._observer),
            *judge_rewards(self._trajectories),
            *judge_ending(self._trajectories, self._rollout.max_turns),
            *judge_closing(self._observer),
            *judge_stalls(self._loop.stalls, self._observer, MAX_STALL),
            *judge_tokens(self._trajectories, self._engine.calls, self._rollout.max_tokens),
        ]

    async def _run(self) -> None:
        """Run group after group, until one hangs: the others would only hang again."""
        sampling = SamplingParams(max_new_tokens=self._rollout.max_new_tokens)
        executor = self._agent.make_executor(self._rollout, self._config.data, probe=False)
        for group in self._groups:
            scheduler = RolloutScheduler.local(
                executor, self._engine, self._chat, sampling, self._rollout
            )
            # Raised where every episode of the group failed; they are recorded all the same.
            with suppress(AgentError, EngineError):
                await scheduler.run([group], self._trajectories.append)
            if self._trajectories[-1].stop_reason is StopReason.TIMEOUT:
                break

    def _make_engine(self, tokenizer: Any) -> ScriptedEngine:
        script = self._config.engine.script
        if script is not None:
            return ScriptedEngine.from_file(script, tokenizer)
        cut_rollout = self._groups[-1].rollout_ids()[-1]
        return ScriptedEngine(CheckScript(self._chat, self._offered_tools, cut_rollout))

    def _offered_tools(self) -> SequenceABC[Mapping[str, Any]]:
        for call in reversed(self._observer.of("reset")):
            if isinstance(call.returned, Observation):
                return call.returned.tools
        return ()

    def _judge_template(self) -> Finding:
        if not self._chat.rewrites:
            return Finding("ok", "template", "only ever appends to the history")
        return Finding(
            "warning",
            "template",
            f"rewrites history ({', '.join(self._chat.rewrites)})",
            "rollout.history keep appends all the same, template follows it with more sequences",
        )


def _short_limits(rollout: RolloutConfig) -> RolloutConfig:
    """The run's limits, shortened; one episode at a time, and none is repeated."""
    return rollout.model_copy(
        update={
            "reset_timeout": min(rollout.reset_timeout, CALL_LIMIT),
            "step_timeout": min(rollout.step_timeout, CALL_LIMIT),
            "close_timeout": min(rollout.close_timeout, CALL_LIMIT),
            "episode_timeout": min(rollout.episode_timeout, CALL_LIMIT * (rollout.max_turns + 2)),
            "max_new_tokens": min(rollout.max_new_tokens, MAX_NEW_TOKENS),
            "max_concurrency": 1,
            "max_retries": 0,
            "fail_fast": False,
            "env_backend": "thread",  # where what it does can be watched
            "min_group_size": 1,
        }
    )
