"""Judges what a check saw: pure functions from recorded calls and trajectories to findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceABC

from agentrl.check.observe import Call, Observer
from agentrl.check.report import Finding
from agentrl.check.watched_loop import Stall
from agentrl.engines.scripted import ScriptedCall
from agentrl.types import StopReason, Trajectory

__all__ = [
    "judge_closing",
    "judge_ending",
    "judge_failures",
    "judge_returns",
    "judge_rewards",
    "judge_stalls",
    "judge_tokens",
]


def judge_returns(observer: Observer) -> Iterator[Finding]:
    """What reset and step return, and whether it always has the same shape."""
    for method in ("reset", "step"):
        shapes = Counter(
            _shape(call.returned)
            for call in observer.of(method)
            if call.ended is not None and not call.raised
        )
        if not shapes:
            continue
        seen = ", ".join(f"{shape} ({n} times)" for shape, n in shapes.most_common())
        # A dict or tuple may well leave things out when the episode is done; a change between
        # kinds of values is more likely a slip.
        kinds = {shape.partition(" ")[0] for shape in shapes}
        if len(kinds) > 1:
            yield Finding(
                "warning",
                method,
                f"returned different kinds of values: {seen}",
                "return the same kind every time, such as agentrl.StepResult",
            )
        else:
            yield Finding("ok", method, f"returned {seen}")


def judge_failures(trajectories: Iterable[Trajectory], observer: Observer) -> Iterator[Finding]:
    """Episodes that raised or hung, once for each different cause."""
    seen = set()
    for trajectory in trajectories:
        if not trajectory.stop_reason.failed:
            continue
        error = (trajectory.error or str(trajectory.stop_reason)).strip()
        cause = error.splitlines()[-1]
        if cause in seen:
            continue
        seen.add(cause)
        if trajectory.stop_reason is StopReason.TIMEOUT:
            yield Finding(
                "error",
                "hanging",
                _describe_hang(observer, cause),
                detail=error,
                remedy="return sooner, or raise rollout.reset_timeout or rollout.step_timeout",
            )
        else:
            yield Finding(
                "error",
                "failure",
                f"an episode failed ({trajectory.stop_reason}): {cause}",
                "correct the line of the agent file that the traceback names",
                error,
            )


def judge_rewards(trajectories: SequenceABC[Trajectory]) -> Iterator[Finding]:
    """Whether there is something to learn from. (Rewards that are not finite fail the episode.)"""
    completed = [t for t in trajectories if not t.stop_reason.failed]
    rewards = [t.reward for t in completed if t.reward is not None]
    if not completed:
        return
    if not rewards:
        yield Finding(
            "error",
            "reward",
            f"none of {len(completed)} episodes had a reward",
            "return a reward from step: an episode in which every reward is None is not trained on",
        )
    elif len(rewards) < len(completed):
        yield Finding(
            "warning",
            "reward",
            f"{len(completed) - len(rewards)} of {len(completed)} episodes had no reward",
            "they are left out of training: return a reward wherever an episode can be scored",
        )
    else:
        yield Finding("ok", "reward", f"from {min(rewards):g} to {max(rewards):g}")


def judge_ending(trajectories: SequenceABC[Trajectory], max_turns: int) -> Iterator[Finding]:
    """Whether episodes end by themselves."""
    completed = [t for t in trajectories if not t.stop_reason.failed]
    if not completed:
        return
    reasons = Counter(t.stop_reason for t in completed)
    seen = ", ".join(f"{reason} ({n} times)" for reason, n in reasons.most_common())
    if StopReason.DONE not in reasons:
        limit = "a token limit"
        if StopReason.MAX_TURNS in reasons:
            limit = f"rollout.max_turns ({max_turns})"
        yield Finding(
            "warning",
            "ending",
            f"no episode ended by itself before {limit}: {seen}",
            "make sure that some answer of the model makes step return done=True, and that "
            "rollout.max_tokens and rollout.max_new_tokens leave room for the episode",
        )
    else:
        yield Finding("ok", "ending", seen)


def judge_closing(observer: Observer) -> Iterator[Finding]:
    """Whether every environment was closed exactly once, and quietly."""
    closes = observer.closes()
    if not closes:
        return
    more = max(closes)
    if min(closes) == 0:
        yield Finding(
            "error",
            "close",
            f"{closes.count(0)} of {len(closes)} environments were not closed",
            "call close in a finally block of your executor",
        )
    if more > 1:
        yield Finding(
            "error",
            "close",
            f"close ran {more} times for one environment",
            "do not call close yourself: agentrl calls it once, whatever happened",
        )
    unfinished = [call for call in observer.of("close") if call.ended is None or call.cancelled]
    if unfinished:
        yield Finding(
            "error",
            "close",
            f"close did not return within rollout.close_timeout ({len(unfinished)} times)",
            "return sooner, or raise rollout.close_timeout",
        )
    if any(call.raised for call in observer.of("close") if call not in unfinished):
        yield Finding(
            "error",
            "close",
            "close raised an exception",
            "close must work after every episode, also after one that failed in reset",
        )
    if set(closes) == {1} and not any(call.raised for call in observer.of("close")):
        yield Finding("ok", "close", f"ran once for each of {len(closes)} environments")


def judge_stalls(
    stalls: Iterable[Stall], observer: Observer, longest_allowed: float
) -> Iterator[Finding]:
    """Coroutines that held the event loop, the longest stall of each method."""
    worst: dict[str, float] = {}
    for stall in stalls:
        for call in observer.calls:
            if call.is_async and _overlap(call, stall) > longest_allowed:
                worst[call.method] = max(worst.get(call.method, 0.0), stall.seconds)
    for method, seconds in worst.items():
        yield Finding(
            "error",
            "blocking",
            f"async def {method} held the event loop, and all other episodes, for {seconds:.2f} s",
            f"write it as a plain `def {method}` (it then runs in a thread of its own), or await",
        )


def judge_tokens(
    trajectories: Iterable[Trajectory], calls: SequenceABC[ScriptedCall], max_tokens: int
) -> Iterator[Finding]:
    """Whether the trajectories hold what the engine was asked, within the budget."""
    completed = [t for t in trajectories if not t.stop_reason.failed]
    requests = Counter(call.rollout_id for call in calls)
    for trajectory in completed:
        longest = max((len(sequence) for sequence in trajectory.sequences), default=0)
        if longest > max_tokens:
            yield Finding(
                "error",
                "tokens",
                f"a sequence has {longest} tokens, rollout.max_tokens is {max_tokens}",
                "build the trajectory with llm.trajectory, or raise rollout.max_tokens",
            )
            return
        if trajectory.num_turns != requests[trajectory.rollout_id]:
            yield Finding(
                "warning",
                "tokens",
                f"an episode called the engine {requests[trajectory.rollout_id]} times and its "
                f"trajectory holds {trajectory.num_turns} turns",
                "turns that are not in the trajectory are not trained on: pass the conversation "
                "that they belong to to llm.trajectory",
            )
            return
    if completed:
        sampled = sum(t.num_sampled for t in completed)
        total = sum(len(sequence) for t in completed for sequence in t.sequences)
        yield Finding(
            "ok", "tokens", f"{sampled} of {total} tokens are the policy's and are trained on"
        )


def _shape(value: object) -> str:
    """A value's type and, for containers, what it holds."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return f"{kind} with {', '.join(map(str, value))}"
    if isinstance(value, tuple):
        return f"{kind} of {len(value)}"
    return kind


def _describe_hang(observer: Observer, cause: str) -> str:
    hung = [call for call in observer.calls if call.ended is None]
    if not hung:
        return cause
    call = hung[-1]
    number = sum(other.instance == call.instance for other in observer.of(call.method))
    return f"call {number} of {call.method} in its episode did not return: {cause}"


def _overlap(call: Call, stall: Stall) -> float:
    """Seconds that both lasted."""
    ended = stall.ended if call.ended is None else call.ended
    return min(ended, stall.ended) - max(call.started, stall.started)
