"""One nested, validated configuration: defaults, then a TOML file, then flags.

The sections are `model, data, engine, rollout, algo, train, log`. Unknown keys and combinations
that cannot work raise, and name the flag and the remedy. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config_algo import (
    AdvantageConfig,
    AlgoConfig,
    CorrectionConfig,
    KLConfig,
    LossConfig,
    ValueConfig,
)
from agentrl.config_base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from agentrl.config_engine import (
    SERVER_KINDS,
    VLLM_LORA_RANKS,
    EngineConfig,
    refuse_temperature,
)
from agentrl.config_model import LoraConfig, ModelConfig

__all__ = [
    "AdvantageConfig",
    "AlgoConfig",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "EngineConfig",
    "KLConfig",
    "LogConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OverlongConfig",
    "RolloutConfig",
    "TrainConfig",
    "ValueConfig",
]


class DataConfig(Section):
    """Where the examples come from. Without a path, the agent file's `examples(split)`."""

    path: str | None = None
    """A .jsonl or .parquet file, or the name or folder of a Hugging Face dataset."""
    split: str = "train"
    """Of the dataset, or what `examples(split)` is called with."""
    eval_path: str | None = None
    """Examples for evaluation; without it, `path` (or `examples`) with `eval_split`."""
    eval_split: str = "test"
    """The same for evaluation."""
    prompt_key: str = "prompt"
    """The field that every row must have when the agent does not make its own first message."""
    label_key: str = "label"
    """The field that holds the right answer, where the agent reads one."""
    max_samples: PositiveInt | None = None
    """Use only so many examples."""
    shuffle: bool = True
    """A new order of the examples in every epoch, by `train.seed`."""


class OverlongConfig(Section):
    """A soft penalty for episodes that come near their limit of tokens (arXiv:2503.14476)."""

    len: NonNegativeInt = 0
    """Tokens before the limit (of a turn or of the episode, whichever is nearer) in which the
    penalty rises from 0; 0: none."""
    penalty_factor: PositiveFloat = 1.0
    """What is taken from the reward of an episode that reached its limit."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> OverlongConfig:
        if self.len == 0:
            why = "rollout.overlong_buffer.len is 0"
            self._refuse_ignored("rollout.overlong_buffer", {"penalty_factor"}, why)
        return self


class RolloutConfig(Section):
    """How episodes run."""

    batch_size: PositiveInt = 16
    """Prompts (groups) of one training step."""
    n_samples_per_prompt: PositiveInt = 8
    """Episodes of one group."""
    max_turns: PositiveInt = 8
    """Most sampled turns of one episode."""
    max_new_tokens: PositiveInt = 256
    """Most sampled tokens of one turn."""
    max_tokens: PositiveInt = 2048
    """Most tokens of one episode, everything counted."""
    temperature: PositiveFloat = 1.0
    """Log-probabilities are those at this temperature, in engine and learner."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 keeps every token."""
    top_k: NonNegativeInt = 0
    """0 keeps every token."""
    logprobs: Literal["auto", "sampler", "learner"] = "auto"
    """Who gives the log-probabilities of sampled tokens. `sampler`: the engine, for every one.
    `learner`: the learner; the engine is asked on `logprobs_share` of the episodes only, for the
    mismatch metrics. `auto`: the engine where `algo.correction` or `algo.loss.old_logprobs` needs
    them or where they cost nothing (every kind but vllm), else the learner. Where `top_p` or
    `top_k` cut the distribution, no engine is asked."""
    logprobs_share: Fraction = 0.05
    """Share of the episodes, chosen by their rollout_id, on which a learner's run asks too."""
    history: Literal["keep", "template"] = "keep"
    """When the chat template rewrites history: keep the sampled tokens, or follow the template
    and fork the trajectory."""
    tool_parser: Literal["auto", "none", "hermes", "qwen", "llama3", "json"] = "auto"
    max_concurrency: PositiveInt = 256
    """Episodes in flight at once, in all processes together."""
    num_processes: PositiveInt = 1
    """Processes that share the episodes, and the requests to the servers of `vllm` or `sglang`,
    where one event loop is not enough for all that are in flight. 1: those of this process."""
    env_backend: Literal["thread", "process", "ray"] = "thread"
    """Where an environment runs. `thread`: in this process, its plain methods in a thread of their
    own. `process`: in a process of its own, forked for each episode: one that crashes, hangs or
    leaks takes nothing with it, and those that compute use all cores. `ray`: in an actor of its own
    somewhere on a Ray cluster, which starts in a second rather than in milliseconds."""
    reset_timeout: PositiveFloat = 60.0
    """Seconds."""
    step_timeout: PositiveFloat = 60.0
    """Seconds."""
    close_timeout: PositiveFloat = 10.0
    """Seconds."""
    episode_timeout: PositiveFloat = 1800.0
    """Seconds."""
    max_retries: NonNegativeInt = 1
    """How often a failed episode is run again with a fresh instance before it is dropped."""
    retry_pause: NonNegativeFloat = 0.5
    """Seconds before it is run again; twice as long before each further attempt, 60 at most."""
    fail_fast: bool = False
    """The first failed attempt ends the run, with its traceback: for finding out why it fails."""
    max_consecutive_failures: PositiveInt = 32
    """So many episodes that failed every attempt, with none completed in between, end the run;
    once one has completed, `max_concurrency` more, since an outage fails all that are in flight."""
    min_group_size: PositiveInt = 1
    """A group with fewer scored episodes is dropped from the step, and replaced by a new one."""
    dynamic_sampling: bool = False
    """Sample further groups in place of those whose task scores are all equal, from the same
    weights, until `batch_size` groups can be trained on (arXiv:2503.14476)."""
    max_refills: PositiveInt = 8
    """How often more groups are sampled in one step, at most, in place of those that do not count:
    failed ones and, with dynamic_sampling, those without spread."""
    overlong_buffer: OverlongConfig = OverlongConfig()
    router_replay: bool = False
    """Mixtures of experts: the engine tells which experts each token went to, and the learner sends
    it there too."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0

    @model_validator(mode="after")
    def _check_combinations(self) -> RolloutConfig:
        if self.overlong_buffer.len > self.max_new_tokens:
            raise ValueError(
                f"rollout.overlong_buffer.len ({self.overlong_buffer.len}) is more than "
                f"rollout.max_new_tokens ({self.max_new_tokens}), so that every episode would be "
                "punished: lower it"
            )
        if self.fail_fast:
            unused = {"max_retries", "retry_pause", "max_consecutive_failures"}
            self._refuse_ignored("rollout", unused, "rollout.fail_fast ends the run before")
        if self.num_processes > self.max_concurrency:
            raise ValueError(
                f"rollout.num_processes ({self.num_processes}) is more than "
                f"rollout.max_concurrency ({self.max_concurrency}), so that some would have no "
                "episode: lower it"
            )
        if self.num_processes > 1 and self.env_backend == "ray":
            raise ValueError(
                "rollout.num_processes above 1 does not go with rollout.env_backend ray, which "
                "each of them would start for itself: set one of them to its default"
            )
        if self.max_retries == 0 and self.retry_pause > 0:
            self._refuse_ignored("rollout", {"retry_pause"}, "rollout.max_retries is 0")
        return self


class TrainConfig(Section):
    """The learner."""

    max_steps: PositiveInt = 100
    """Rollout batches to train on."""
    seed: NonNegativeInt = 0
    """Of weights, sampling and the order of examples."""
    lr: PositiveFloat = 1e-6
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls over the run, to 0 (constant: not)."""
    warmup_steps: NonNegativeInt = 0
    """Training steps in which the learning rate rises to `lr`."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's, for the mean and the square of the gradient."""
    max_grad_norm: NonNegativeFloat = 1.0
    """0: no clipping."""
    max_staleness: NonNegativeInt = 0
    """By how many versions the weights that sampled a token may be older than those trained on it.
    0: sample, then train; more: rollouts go on meanwhile, as far ahead as this allows."""
    stale: Literal["wait", "drop", "mask", "keep"] = "wait"
    """What becomes of tokens that are older, when their batch is formed. `wait`: there are none,
    since the batch waits for episodes that would become too old; otherwise it does not. `drop`:
    their episodes are left out. `mask`: they give no gradient. `keep`: they are trained on like the
    others, by their ratio to the newest weights."""
    ppo_epochs: PositiveInt = 1
    """Passes over one rollout batch."""
    mini_batches: PositiveInt = 1
    """Optimizer steps of one pass over a whole batch; a batch with dropped groups makes fewer."""
    shuffle: Literal["groups", "episodes"] = "groups"
    """What is dealt out at random among the mini-batches of a pass: `groups` keeps the episodes of
    a prompt together, so that it is computed once; `episodes` mixes them."""
    max_tokens_per_gpu: PositiveInt = 16384
    """Computed tokens of one pass, padding and repeated prefixes included. A trie goes through in
    as many passes as it needs; of rows, each must fit."""
    prefix_sharing: Literal["auto", "trie", "packed", "padded"] = "auto"
    """`trie`: tokens that sequences share (the prompt of a group, the history of a fork) are
    computed once; `packed`: every sequence for itself, several in a row; `padded`: each in a row of
    its own; `auto`: the first of them that the model can."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share out the weights of each linear layer (AutoTP)."""
    sequence_parallel_size: PositiveInt = 1
    """Ranks that compute one trie together, each a part of its nodes and heads (Ulysses): for
    sequences whose activations are too much for one GPU."""
    gradient_checkpointing: bool = False
    """Compute activations again in backward: less memory, more time."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What stays in host memory: `optimizer`: float32 weights, moments and their update; `all`: the
    weights too, which go to the GPU a few at a time. Less GPU memory, much more time."""
    reference_offload: bool = False
    """The same for the weights of the reference policy, which are needed once a step."""
    offload_for_rollouts: bool = True
    """With engine.enable_sleep, the learner's weights, gradients and states wait in host memory
    while the engine samples. False leaves them on the GPU, which saves the time of moving them
    where both fit: the engine's share of the GPU must leave room for them."""
    save_steps: NonNegativeInt = 0
    """A checkpoint every so many steps, and at the end; 0: only at the end."""
    max_checkpoints: PositiveInt = 2
    """The newest ones are kept."""
    eval_steps: NonNegativeInt = 0
    """An evaluation every so many steps; 0: never."""
    eval_on_start: bool = False
    """One more before the first step, logged as step 0."""
    eval_samples_per_prompt: PositiveInt = 1
    """Episodes of each evaluation example."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> TrainConfig:
        if self.mini_batches == 1:
            self._refuse_ignored("train", {"shuffle"}, "train.mini_batches is 1")
        return self


class LogConfig(Section):
    """Where a run writes."""

    run_dir: Path | None = None
    """Without it, `runs/<agent>-<date>-<time>`."""
    tensorboard: bool = True
    """Write event files into the run directory."""
    wandb: str | None = None
    """Weights & Biases project."""
    trackio: str | None = None
    """Trackio project."""
    trajectories: NonNegativeInt = 16
    """Trajectories of each step that the report shows; 0: none."""


class Config(Section):
    """A whole run."""

    agent: Path
    """The user's agent file."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    algo: AlgoConfig = AlgoConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Config:
        rollout, algo = self.rollout, self.algo
        estimator = algo.advantage.estimator
        if algo.advantage.compares_groups and rollout.n_samples_per_prompt < 2:
            raise ValueError(
                f"rollout.n_samples_per_prompt is 1 but algo.advantage.estimator {estimator} "
                "compares the samples of one prompt: set it to at least 2, or use "
                "reinforce_plus_plus or gae"
            )
        if rollout.dynamic_sampling and not (
            algo.advantage.compares_groups and algo.advantage.drop_zero_variance
        ):
            raise ValueError(
                "rollout.dynamic_sampling replaces groups without spread, but "
                f"algo.advantage.estimator {estimator} trains on them too: use a group estimator "
                "(grpo, dr_grpo, rloo) with algo.advantage.drop_zero_variance, or set "
                "rollout.dynamic_sampling false"
            )
        if rollout.min_group_size > rollout.n_samples_per_prompt:
            raise ValueError(
                f"rollout.min_group_size ({rollout.min_group_size}) is more than "
                f"rollout.n_samples_per_prompt ({rollout.n_samples_per_prompt}): every group "
                "would be dropped"
            )
        if rollout.max_new_tokens > rollout.max_tokens:
            raise ValueError(
                f"rollout.max_new_tokens ({rollout.max_new_tokens}) is more than "
                f"rollout.max_tokens ({rollout.max_tokens}): raise rollout.max_tokens"
            )
        if rollout.truncates:
            _refuse_ratios_to_the_sampler(algo)
        self._check_logprobs()
        self._check_lora()
        self._check_learner()
        self._check_staleness()
        if rollout.num_processes > 1 and self.engine.kind not in SERVER_KINDS:
            raise ValueError(
                f"rollout.num_processes above 1 needs an engine that is a server, and engine.kind "
                f"{self.engine.kind} samples in this process: use vllm or sglang, or set it to 1"
            )
        refuse_temperature(self.engine.kind, rollout.temperature)
        if self.engine.kind == "scripted" and self.engine.script is None:
            raise ValueError("engine.kind scripted needs engine.script, a file of responses")
        if self.engine.script is not None and self.engine.kind != "scripted":
            raise ValueError("engine.script is set but engine.kind is not scripted: remove it")
        return self

    @property
    def sends_adapter(self) -> bool:
        """Whether engines get the LoRA adapter alone rather than all weights."""
        engine = self.engine
        return self.model.lora.rank > 0 and engine.kind == "vllm" and engine.lora != "merged"

    def _check_learner(self) -> None:
        train, rollout = self.train, self.rollout
        rows = train.prefix_sharing in ("packed", "padded")
        if train.sequence_parallel_size > 1 and rows:
            raise ValueError(
                "train.sequence_parallel_size shares out tries, and train.prefix_sharing is "
                f"{train.prefix_sharing}: set one of them to its default"
            )
        if rollout.router_replay and self.engine.router_url is not None:
            raise ValueError(
                "rollout.router_replay asks servers for experts, a field that sglang-router drops: "
                "leave out engine.router_url"
            )
        if rollout.router_replay and self.engine.kind == "scripted":
            raise ValueError(
                "rollout.router_replay needs an engine with a model, and engine.kind is scripted: "
                "remove it"
            )
        if train.sequence_parallel_size > 1 and rollout.router_replay:
            raise ValueError(
                "rollout.router_replay does not know which tokens a rank has with "
                "train.sequence_parallel_size above 1: set one of them to its default"
            )
        shards = train.tensor_parallel_size
        if shards > 1 and (train.sequence_parallel_size > 1 or self.model.lora.rank):
            other = "model.lora" if self.model.lora.rank else "train.sequence_parallel_size"
            raise ValueError(
                f"train.tensor_parallel_size does not go with {other}: set one to its default"
            )
        if not train.offload_for_rollouts and not self.engine.enable_sleep:
            raise ValueError(
                "train.offload_for_rollouts would be ignored: the learner gives the GPU away only "
                "with engine.enable_sleep; set that, or leave this out"
            )
        if train.reference_offload and (self.algo.kl.coef == 0 or self.model.lora.rank):
            why = (
                "model.lora scores with the policy itself"
                if self.algo.kl.coef
                else "algo.kl.coef is 0"
            )
            raise ValueError(
                "train.reference_offload would be ignored, since there is no reference model: "
                f"{why}; set it false"
            )
        if rollout.max_tokens > train.max_tokens_per_gpu and rows:
            raise ValueError(
                f"train.max_tokens_per_gpu ({train.max_tokens_per_gpu}) is less than "
                f"rollout.max_tokens ({rollout.max_tokens}), but with train.prefix_sharing "
                f"{train.prefix_sharing} one episode must fit a pass: raise it, or set "
                "train.prefix_sharing auto"
            )

    def _check_staleness(self) -> None:
        if self.train.max_staleness == 0:
            self.train._refuse_ignored("train", {"stale"}, "train.max_staleness is 0")
            return
        if self.engine.kind == "transformers":
            raise ValueError(
                "train.max_staleness above 0 samples while the weights change, but engine.kind "
                "transformers samples from the learner's own: use vllm or sglang, or set it to 0"
            )
        if self.engine.enable_sleep:
            raise ValueError(
                "train.max_staleness above 0 samples and trains at the same time, but with "
                "engine.enable_sleep they take turns on the same GPUs: set one of them to its "
                "default"
            )
        if not self.algo.needs_sampler_logprobs:
            raise ValueError(
                "train.max_staleness above 0 trains on tokens of older weights, whose ratio to the "
                "newest must be known: set algo.correction.kind (tis, for one), or "
                "algo.loss.old_logprobs sampler"
            )

    def _check_lora(self) -> None:
        if self.model.lora.rank == 0:
            self.engine._refuse_ignored("engine", {"lora"}, "model.lora.rank is 0: no LoRA")
        if self.sends_adapter:
            self.engine.check_adapter()
            if self.model.lora.rank > VLLM_LORA_RANKS[-1]:
                raise ValueError(
                    f"model.lora.rank {self.model.lora.rank} is more than vLLM takes "
                    f"({VLLM_LORA_RANKS[-1]}): lower it, or set engine.lora merged"
                )

    @property
    def sampler_logprobs_share(self) -> float:
        """Share of the episodes on which the engine is asked for log-probabilities."""
        return self._logprobs_from()[0]

    def _logprobs_from(self) -> tuple[float, str]:
        """The share of the episodes that the engine is asked on, and why it is not another."""
        rollout, wanted = self.rollout, self.rollout.logprobs
        if rollout.truncates:
            return 0.0, "no engine is asked where rollout.top_p or top_k cut the distribution"
        if wanted == "auto":
            free = self.engine.kind != "vllm"
            wanted = "sampler" if free or self.algo.needs_sampler_logprobs else "learner"
        if wanted == "sampler":
            return 1.0, "the engine is asked on every episode (rollout.logprobs)"
        return rollout.logprobs_share, ""

    def _check_logprobs(self) -> None:
        rollout, algo = self.rollout, self.algo
        if rollout.logprobs == "learner" and algo.needs_sampler_logprobs:
            raise ValueError(
                "rollout.logprobs learner leaves most episodes without the engine's "
                "log-probabilities, which algo.correction.kind "
                f"{algo.correction.kind} or algo.loss.old_logprobs {algo.loss.old_logprobs} needs: "
                "set rollout.logprobs auto"
            )
        if rollout.logprobs == "sampler" and rollout.truncates:
            raise ValueError(
                "rollout.logprobs sampler with rollout.top_p < 1 or rollout.top_k > 0 asks for "
                "log-probabilities that cannot be compared with the learner's: set "
                "rollout.logprobs auto, or keep every token"
            )
        _, why = self._logprobs_from()
        if why:
            rollout._refuse_ignored("rollout", {"logprobs_share"}, why)


def _refuse_ratios_to_the_sampler(algo: AlgoConfig) -> None:
    """Truncated sampling has other probabilities than the learner, by far and for no fault."""
    for flag, value, remedy in (
        ("algo.loss.old_logprobs", algo.loss.old_logprobs, "learner"),
        ("algo.correction.kind", algo.correction.kind, "none"),
    ):
        if value != remedy:
            raise ValueError(
                f"rollout.top_p < 1 or rollout.top_k > 0 with {flag} {value} gives ratios between "
                f"different distributions: set {flag} {remedy}, or keep every token"
            )
