"""The training loop: sample, learn, push the weights back; read `TrainingRun.run` first.

With `train.max_staleness` 0 it is synchronous (on-policy): every token of a step is sampled from
the weights of the step before, and what a step does depends on nothing but the configuration and
the checkpoint it started from, so that a resumed run equals one that never stopped. Otherwise
rollouts run ahead of training (see `ahead`). Rank 0 runs it; the other ranks follow its learner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from agentrl import event_loop
from agentrl.config import Config
from agentrl.config_engine import SERVER_KINDS
from agentrl.cursor import ExampleCursor, all_groups
from agentrl.data import Examples, load_examples
from agentrl.engines.installed import check_python
from agentrl.engines.transport.select import check_transport
from agentrl.errors import AgentError, UsageError
from agentrl.executors.base import AgentExecutor
from agentrl.executors.failure_text import shorten
from agentrl.executors.groups import GroupRequest, RolloutResult, spread_warning
from agentrl.plugin import Agent, load_agent
from agentrl.train.ahead import RolloutsAhead
from agentrl.train.buffer import load_finished, save_finished
from agentrl.train.checkpoint import (
    checkpoint_path,
    latest_checkpoint,
    prune,
    write_atomically,
)
from agentrl.train.distributed import is_main_process
from agentrl.train.episode_log import EpisodeLog
from agentrl.train.eval_result import summarize
from agentrl.train.interrupt import Interrupted, StopRequest, ignore_first_signal, stop_on_signal
from agentrl.train.learner import Learner, build_learner
from agentrl.train.loop_state import LoopState
from agentrl.train.metrics import REWARD, MetricWriter, open_metrics
from agentrl.train.mismatch import sample_mismatch, samples_to_compare
from agentrl.train.progress import Progress
from agentrl.train.refill import count_filling, refill_warnings, sample_until_full
from agentrl.train.rundir import RunDir, write_summary
from agentrl.train.sampler import Sampler, build_engine
from agentrl.train.stale import drop_stale, stale_metrics, staleness_metrics
from agentrl.train.stats import (
    engine_metrics,
    episode_metrics,
    eval_metrics,
)
from agentrl.train.token_text import TokenText
from agentrl.train.trajectories import write_trajectories
from agentrl.train.update import policy_update
from agentrl.types import Trajectory
from agentrl.view.report import build_report

__all__ = ["train"]

SUMMARY_STEPS = 5
"""`reward_first` and `reward_last` are means over so many steps."""

MAX_EMPTY_BATCHES = 3
"""So many batches without a single usable group end the run."""


def train(config: Config, *, resume: bool = False) -> Path:
    """Train as `config` says and return the run directory. Call it on every rank.

    Raises:
        UsageError: something about the configuration, agent, data or model is wrong.
        Interrupted: Ctrl-C or SIGTERM; the finished steps are saved.
        AgentRLError: the run failed; what was saved before is kept.
    """
    if not is_main_process():
        with ignore_first_signal():
            build_learner(config).follow()
        return config.log.run_dir or Path()
    agent = load_agent(config.agent)
    examples = load_examples(config.data, agent)
    evaluates = config.train.eval_steps or config.train.eval_on_start
    evaluation = load_examples(config.data, agent, evaluation=True) if evaluates else None
    check_python(config.engine)
    check_transport(config.engine)
    # Built before the directory is: an agent that cannot start leaves none behind.
    executor = agent.make_executor(config.rollout, config.data)
    state = _saved_state(config) if resume else LoopState()
    with (
        RunDir.resume(config, state.step) if resume else RunDir.create(config) as run,
        stop_on_signal("finishing this step, then saving; once more to end now") as stop,
    ):
        learner = build_learner(config)
        try:
            if state.step:
                learner.load(checkpoint_path(run.checkpoints, state.step))
            with (
                open_metrics(run, config, first_step=state.step + 1) as metrics,
                Progress(config.train.max_steps, done_steps=state.step) as progress,
            ):
                training = TrainingRun(
                    config,
                    agent,
                    executor,
                    run,
                    learner,
                    examples,
                    evaluation,
                    state,
                    metrics,
                    progress,
                )
                event_loop.run(training.run(stop))
        finally:
            learner.close()
        _say_where(build_report(run.path), run)
        return run.path


class TrainingRun:
    """One run on rank 0: what it holds, and the steps of the loop."""

    def __init__(
        self,
        config: Config,
        agent: Agent,
        executor: AgentExecutor,
        run: RunDir,
        learner: Learner,
        examples: Examples,
        evaluation: Examples | None,
        state: LoopState,
        metrics: MetricWriter,
        progress: Progress,
    ) -> None:
        assert learner.tokenizer is not None, "build_learner gives the learner its tokenizer"
        self._config, self._agent, self._run, self._learner = config, agent, run, learner
        self._tokenizer: PreTrainedTokenizerBase = learner.tokenizer
        self._evaluation, self._state = evaluation, state
        self._metrics, self._progress = metrics, progress
        self._token_text = TokenText(self._tokenizer)
        self._episode_log = EpisodeLog(run.trajectories)
        self._cursor = ExampleCursor(examples, seed=config.train.seed, shuffle=config.data.shuffle)
        if state.cursor:
            self._cursor.load_state_dict(state.cursor)
        engine = build_engine(
            config,
            learner.policy_config,
            self._tokenizer,
            run_dir=run.path,
            save_model=self._save_first_model,
        )
        self._sampler = Sampler(
            config, executor, engine, self._tokenizer, learner.generation_config
        )
        self._ahead = self._make_ahead() if config.train.max_staleness else None
        self._saved_step = state.step
        self._empty_batches = 0
        self._warned: set[str] = set()
        self._began = time.perf_counter() - state.train_seconds

    def _make_ahead(self) -> RolloutsAhead:
        config = self._config
        return RolloutsAhead(
            self._sample_group,
            self._draw_group,
            self._fills_batch,
            lambda missing: refill_warnings(missing, config.rollout),
            batch_size=config.rollout.batch_size,
            max_staleness=config.train.max_staleness,
            max_refills=config.rollout.max_refills,
            waits=config.train.stale == "wait",
            admit=self._admit,
        )

    async def run(self, stop: StopRequest) -> None:
        """Go through the steps that are left, then save the model and the summary."""
        self._say_what_starts()
        async with self._started():
            await self._push_weights()
            self._sampler.engine.stats()  # what came before the first step is no step's
            if self._config.train.eval_on_start and self._state.step == 0:
                self._finish_step(await self._evaluate())
            self._restore_finished()
            try:
                while self._state.step < self._config.train.max_steps:
                    await self._whole_step()
                    if stop.signum is not None:
                        self._stop(stop.signum)
                if self._saved_step < self._state.step:
                    self._save_checkpoint()
            finally:
                if self._ahead is not None:
                    await self._ahead.close()
                self._episode_log.flush()
        self._save_model(self._run.model)
        if self._config.model.lora.rank:
            with write_atomically(self._run.adapter) as folder:
                self._learner.save_adapter(folder)
        self._write_summary()

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        """The engine runs in this block. Where it shares GPUs with the learner, it sees them empty
        when it starts, since it takes a share of what is free, and then sleeps."""
        self._yield_gpu()
        async with self._sampler:
            await self._take_gpu()
            yield

    def _say_what_starts(self) -> None:
        engine = self._config.engine
        if engine.kind in SERVER_KINDS and not engine.urls:
            logs = self._run.path / "engines"
            self._progress.note(f"starting {engine.kind} x {engine.num_engines}; logs in {logs}")

    async def _whole_step(self) -> None:
        """A step, and what is due after it."""
        metrics = await self._step()
        if self._due(self._config.train.eval_steps):
            metrics |= await self._evaluate()
        # Logged before it is saved: resuming cuts off what was logged too much, but could not bring
        # back the line of a step that a checkpoint already holds.
        self._finish_step(metrics)
        if self._due(self._config.train.save_steps):
            self._save_checkpoint()

    async def _step(self) -> dict[str, float]:
        """Sample a batch, learn from it, push the weights: one step."""
        rollout = await self._sample()
        ages = staleness_metrics(rollout.trajectories, self._state.step)
        if self._ahead is not None:
            oldest = self._state.step - self._config.train.max_staleness
            ages |= stale_metrics(rollout, oldest, self._config.train.stale)
        with self._progress.phase("update"):
            update = await self._update(rollout.trajectories)
        self._state.step += 1
        await self._push_weights()
        sampled = sum(t.num_sampled for t in rollout.trajectories)
        self._state.tokens_sampled += sampled
        self._state.tokens_trained += int(update.get("policy/tokens_trained", 0))
        metrics = episode_metrics(rollout.trajectories) | rollout.metrics() | update | ages
        if self._ahead is not None:
            metrics |= self._ahead.metrics(self._state.step)
        if REWARD in metrics:
            self._state.rewards.append(metrics[REWARD])
        metrics |= engine_metrics(self._sampler.engine.stats())
        metrics["throughput/tokens_per_second"] = sampled / rollout.seconds
        self._write_trajectories(rollout.outcomes)
        return metrics

    async def _update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train on a batch; beside the event loop where rollouts go on meanwhile."""
        arguments = (self._learner, trajectories, self._config)
        await self._sampler.engine.weights_will_change()
        if self._ahead is None:
            return policy_update(*arguments, step=self._state.step)
        return await asyncio.to_thread(policy_update, *arguments, step=self._state.step)

    async def _sample(self) -> RolloutResult:
        settings = self._config.rollout
        async with self._engine_turn("rollout"):
            if self._ahead is not None:
                self._progress.rollouts_wanted(settings.batch_size * settings.n_samples_per_prompt)
                steps_left = self._config.train.max_steps - self._state.step
                rollout = await self._ahead.next_batch(self._state.step, steps_left)
            else:
                rollout = await sample_until_full(self._sample_groups, settings, self._config.algo)
        self._note_warnings(rollout)
        compares = self._config.algo.advantage.compares_groups
        if compares and (warning := spread_warning(rollout.groups)) is not None:
            self._warn_once("no_spread", warning)
        self._empty_batches = 0 if rollout.groups else self._empty_batches + 1
        is_last = self._state.step + 1 == self._config.train.max_steps
        if self._empty_batches == MAX_EMPTY_BATCHES or (self._empty_batches and is_last):
            raise AgentError(
                f"the batch of step {self._state.step + 1} is number {self._empty_batches} in a "
                "row without a group of rollout.min_group_size scored episodes, so that the newest "
                f"weights are not to be trusted; the last failure: {_first_failure(rollout)}"
            )
        return rollout

    async def _sample_groups(self, count: int) -> RolloutResult:
        """Sample the next `count` groups of the data."""
        members = self._config.rollout.n_samples_per_prompt
        self._progress.rollouts_wanted(count * members)
        return await self._sampler.run(self._cursor.next_groups(count, members), self._count)

    def _draw_group(self) -> GroupRequest:
        return self._cursor.next_groups(1, self._config.rollout.n_samples_per_prompt)[0]

    async def _sample_group(self, request: GroupRequest) -> RolloutResult:
        settings = self._config.rollout
        patience = settings.batch_size * settings.n_samples_per_prompt
        return await self._sampler.run([request], self._count, patience=patience)

    def _admit(self, group: RolloutResult, version: int) -> RolloutResult:
        """What of a group may be in the batch that makes the weights after `version`."""
        if self._config.train.stale != "drop":
            return group
        oldest = version - self._config.train.max_staleness
        return drop_stale(group, oldest, self._config.rollout.min_group_size)

    def _fills_batch(self, group: RolloutResult) -> bool:
        """Whether a group counts as one of the `batch_size` of its batch."""
        return bool(count_filling(group, self._config.rollout, self._config.algo))

    async def _push_weights(self) -> None:
        """Give the engine the learner's weights, as the version that the step number is."""
        engine, source = self._sampler.engine, self._learner.weight_source(self._state.step)
        with self._progress.phase("sync"):
            if self._config.engine.enable_sleep:
                await engine.wake(("weights",))
            await engine.update_weights(source)

    @asynccontextmanager
    async def _engine_turn(self, phase: str) -> AsyncIterator[None]:
        """Sample in this block, after `_push_weights`. Where engine and learner share GPUs, the
        learner's states wait on the host meanwhile, and the engine sleeps afterwards."""
        shared = self._config.engine.enable_sleep
        if shared:
            with self._progress.phase("sleep"):
                self._yield_gpu()
                await self._sampler.engine.wake(("kv_cache",))
        with self._progress.phase(phase):
            yield
        if shared:
            with self._progress.phase("sleep"):
                await self._take_gpu()

    def _yield_gpu(self) -> None:
        """Make room for an engine on the learner's GPUs."""
        if self._config.engine.enable_sleep and self._config.train.offload_for_rollouts:
            self._learner.offload()

    async def _take_gpu(self) -> None:
        """The learner's turn on GPUs that it shares with the engine."""
        if self._config.engine.enable_sleep:
            await self._sampler.engine.sleep(self._config.engine.sleep_level)
            if self._config.train.offload_for_rollouts:
                self._learner.reload()

    async def _evaluate(self) -> dict[str, float]:
        """Sample every example of the evaluation set."""
        assert self._evaluation is not None, "loaded when an evaluation is asked for"
        step = self._state.step
        requests = all_groups(
            self._evaluation,
            self._config.train.eval_samples_per_prompt,
            prefix=f"eval-{step:06d}-",
        )
        async with self._engine_turn("eval"):
            rollout = await self._sampler.run(requests, self._episode_log.add)
        if self._config.engine.enable_sleep:
            await self._push_weights()
        self._note_warnings(rollout)
        self._write_trajectories(rollout.outcomes, evaluation=True)
        engine = self._sampler.engine
        await engine.refresh_stats()
        compared = samples_to_compare(rollout.outcomes)
        metrics = engine_metrics(engine.stats())
        if compared:
            metrics |= sample_mismatch(compared, self._learner.logprobs(compared))
        metrics = {f"eval/{name}": value for name, value in metrics.items()}
        return metrics | eval_metrics(summarize(rollout.outcomes))

    def _due(self, every: int) -> bool:
        return every > 0 and self._state.step % every == 0

    def _count(self, trajectory: Trajectory) -> None:
        self._episode_log.add(trajectory)
        self._progress.rollout_advanced(1, trajectory.num_sampled)

    def _note_warnings(self, rollout: RolloutResult) -> None:
        """Say what is suspicious about a batch, each kind once in a run."""
        for kind, warning in rollout.warnings.items():
            self._warn_once(kind, warning)

    def _warn_once(self, kind: str, warning: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._progress.note(f"warning: {warning}")

    def _finish_step(self, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **self._progress.phase_seconds()}
        self._metrics.log(self._state.step, metrics)
        self._progress.step_done(self._state.step, metrics)

    def _save_checkpoint(self) -> None:
        """Write learner and loop state aside, rename, and drop the oldest checkpoints."""
        self._state.train_seconds = time.perf_counter() - self._began
        with (
            self._progress.phase("save"),
            write_atomically(checkpoint_path(self._run.checkpoints, self._state.step)) as folder,
        ):
            self._learner.save(folder)
            if self._config.model.lora.rank:
                self._learner.save_adapter(folder / "adapter")
            again = self._save_finished(folder)
            self._state.cursor = self._cursor.state_dict(again=again)
            self._state.save(folder)
        prune(self._run.checkpoints, self._config.train.max_checkpoints)
        self._saved_step = self._state.step

    def _save_finished(self, folder: Path) -> list[str]:
        """Write the groups that are finished and in no batch yet; the ids of all others that are
        under way, to be drawn again."""
        if self._ahead is None:
            return []
        groups, again = self._ahead.finished, self._ahead.unfinished
        if self._config.rollout.router_replay:  # files of episodes hold no experts
            return again + [group.group_id for group in groups]
        save_finished(folder, self._state.step, groups)
        return again

    def _restore_finished(self) -> None:
        """Take up the groups that the checkpoint holds."""
        step = self._state.step
        if self._ahead is None or step == 0:
            return
        groups = load_finished(checkpoint_path(self._run.checkpoints, step), step)
        self._ahead.restore(groups)
        if groups:
            self._progress.note(f"{len(groups)} groups were sampled ahead before the run ended")

    def _save_model(self, path: Path) -> None:
        with write_atomically(path) as folder:
            self._learner.save_pretrained(folder)

    def _save_first_model(self, path: Path) -> None:
        """Write what servers start from."""
        if self._config.sends_adapter and self._state.step:
            raise UsageError(
                f"{path} is gone, the model that the servers load the LoRA adapter beside: name "
                "the folder of the base model with --model.path, or set engine.lora merged"
            )
        self._save_model(path)

    def _stop(self, signum: int) -> None:
        if self._saved_step < self._state.step:
            self._save_checkpoint()
        raise Interrupted(
            f"stopped after step {self._state.step} of {self._config.train.max_steps}; go on with "
            f"--resume {self._run.path}",
            signum,
        )

    def _write_trajectories(
        self, trajectories: Sequence[Trajectory], *, evaluation: bool = False
    ) -> None:
        write_trajectories(
            self._run.trajectories,
            self._state.step,
            trajectories,
            evaluation=evaluation,
            token_texts=self._token_text,
            with_texts=self._config.log.trajectories,
        )
        self._episode_log.settle(trajectories)

    def _write_summary(self) -> None:
        rewards, possible = self._state.rewards, self._agent.agent_class.max_reward
        first, last = rewards[:SUMMARY_STEPS], rewards[-SUMMARY_STEPS:]
        write_summary(
            self._run.path,
            {
                "reward_first": sum(first) / len(first) / possible if first else None,
                "reward_last": sum(last) / len(last) / possible if last else None,
                "train_seconds": time.perf_counter() - self._began,
                "steps": self._state.step,
                "tokens_sampled": self._state.tokens_sampled,
                "tokens_trained": self._state.tokens_trained,
            },
        )


def _saved_state(config: Config) -> LoopState:
    """The state of the newest checkpoint of the run; a new one where nothing was saved yet."""
    if config.log.run_dir is None:
        raise UsageError("nothing to resume: name the run directory, --resume RUN_DIR")
    latest = latest_checkpoint(config.log.run_dir / "checkpoints")
    return LoopState() if latest is None else LoopState.load(latest)


def _first_failure(rollout: RolloutResult) -> str:
    if not rollout.dropped:
        return "no episode was scored"
    first = rollout.dropped[0]
    return f"episode {first.rollout_id} ended as {first.stop_reason}: {shorten(first.error or '')}"


def _say_where(report: Path, run: RunDir) -> None:
    print(f"run directory: {run.path}")
    print(f"learning curve: {report.with_name('curve.png')}")
    print(f"trajectories: {report}")
