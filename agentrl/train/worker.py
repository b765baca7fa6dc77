"""What one rank of the learner does: its share of the scoring, training, saving.

All ranks call the same methods with micro-batches of their own, equally many on each; every method
is a collective unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl import heap
from agentrl.config import AlgoConfig, Config
from agentrl.errors import UsageError
from agentrl.models.activations import recompute_activations
from agentrl.models.liger import use_liger_kernels
from agentrl.models.lora import Adapter
from agentrl.train.critic import Critic
from agentrl.train.distributed import RankGroup
from agentrl.train.flops import ModelFlops
from agentrl.train.microbatch import MicroBatch
from agentrl.train.objective import LossTerms, Sums, add_sums, loss_and_sums, loss_terms
from agentrl.train.offload import HostCopy
from agentrl.train.optimizer import build_optimizer
from agentrl.train.passes import Pass
from agentrl.train.scorer import TokenScorer, TokenScores, policy_names
from agentrl.train.sequence_parallel import SHARED_TREE_ATTENTION, SequenceGroup
from agentrl.train.sharing import choose_sharing
from agentrl.train.state import load_rank, save_rank
from agentrl.train.tree_attention import TREE_ATTENTION
from agentrl.train.zero import (
    end,
    gather_in_buckets,
    keeps_whole,
    move_back,
    move_to_host,
    start_scoring,
    start_training,
    step_optimizer,
)

__all__ = ["LearnerWorker", "SampleScores", "StepOutcome"]

Floats = NDArray[np.float32]


class SampleScores(NamedTuple):
    """Of the sampled tokens of one sample: log-probabilities [R]; values [R] if there is a head."""

    logprobs: Floats
    values: Floats | None


class StepOutcome(NamedTuple):
    """What an optimizer step did: norm of the gradient before clipping, learning rate used, and the
    norm of a value model's own gradient."""

    grad_norm: float
    lr: float
    value_grad_norm: float | None = None


class LearnerWorker:
    """The policy under ZeRO-3 on one rank, with its optimizer and reference policy."""

    def __init__(
        self,
        group: RankGroup,
        policy: PreTrainedModel,
        config: Config,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: PreTrainedModel | None = None,
        value_model: PreTrainedModel | None = None,
    ) -> None:
        separate_values = config.algo.value.model == "separate"
        assert separate_values == (value_model is not None), "algo.value.model says which"
        self.group, self.policy, self.tokenizer = group, policy, tokenizer
        self.adapter: Adapter | None = None
        if config.model.lora.rank:
            self.adapter = Adapter(
                policy, config.model.lora, seed=config.train.seed, base=config.model.path
            )
        self.scorer = TokenScorer(
            policy,
            temperature=config.rollout.temperature,
            value_head=config.algo.advantage.estimator == "gae" and not separate_values,
            router_replay=config.rollout.router_replay,
        )
        self._flops = ModelFlops.of(policy)
        self.sharing = choose_sharing(policy, config)
        """How micro-batches are to be laid out."""
        self._sequence = self._join_sequence(config)
        attention = None
        if self.sharing == "trie":
            attention = TREE_ATTENTION if self._sequence is None else SHARED_TREE_ATTENTION
            policy.set_attn_implementation(attention)
        if config.train.gradient_checkpointing:
            recompute_activations(policy)
        optimizer = build_optimizer(self.scorer, config.train)
        world_size, self._shards = group.world_size, config.train.tensor_parallel_size
        _check_shards(policy, self._shards, world_size)
        self.keeps_whole = keeps_whole(config.train, world_size)
        """Whether `named_weights` gathers nothing."""
        self.engine = start_training(self.scorer, optimizer, config.train, world_size=world_size)
        self.lr = config.train.lr
        self.optimizer_steps = 0
        self.critic: Critic | None = None
        if value_model is not None:
            self._flops += ModelFlops.of(value_model, head=False)
            self.critic = Critic(
                group, value_model, config, attention=attention, sequence=self._sequence
            )
        self._away: HostCopy | None = None
        self.reference_engine = None
        if reference is not None:
            self.reference_engine = self._start_reference(reference, config, attention)
        if config.model.use_liger_kernel:
            # Last: some of it is for all models of the type, and works on a GPU only.
            for model in (policy, reference, value_model):
                if model is not None:
                    use_liger_kernels(model)
        if config.train.max_staleness:
            heap.freeze(self)  # episodes are under way whenever it steps

    def _start_reference(
        self, reference: PreTrainedModel, config: Config, attention: str | None
    ) -> Any:
        scorer = TokenScorer(reference, temperature=config.rollout.temperature)
        if attention is not None:
            reference.set_attn_implementation(attention)
        return start_scoring(
            scorer,
            world_size=self.group.world_size,
            offload=config.train.reference_offload,
            shards=self._shards,
        )

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> list[list[SampleScores]]:
        """Score with the policy and the values as they are; one list for each micro-batch."""
        return self._score_all(self.engine, micro_batches, self.critic)

    @torch.no_grad()
    def score_reference(self, micro_batches: Sequence[MicroBatch]) -> list[list[SampleScores]]:
        """Score with the reference policy: under LoRA, the policy without its factors."""
        if self.adapter is not None:
            with self.adapter.disabled():
                return self._score_all(self.engine, micro_batches)
        assert self.reference_engine is not None, "the learner was built without a reference"
        return self._score_all(self.reference_engine, micro_batches)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], algo: AlgoConfig
    ) -> tuple[Sums, list[list[SampleScores]]]:
        """Add the gradient of the loss to what is there; returns its sums and the scores."""
        sums, scores = [], []
        for i, micro_batch in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            terms = loss_terms(micro_batch, self.group.device)
            values_N = None
            if self.critic is not None:
                values_N = self.critic.learn(micro_batch, terms, algo, is_last=is_last)
            run = self._pass(self.engine, micro_batch)
            token_scores, counted = run.backward(
                partial(_loss, values_N=values_N, terms=terms, algo=algo),
                entropy_grad=algo.entropy_coef != 0,
                is_last=is_last,
                # DeepSpeed averages over ranks that do not share layers; the weights already make
                # the loss a sum over them.
                scale=self.group.world_size / self._shards,
            )
            counted["tokens_given"] = float(micro_batch.num_given)
            counted["tokens_computed"] = float(run.work.tokens)
            counted["flops"] = self._flops.total(run.work)
            sums.append(counted)
            scores.append(_split(token_scores.with_values(values_N), micro_batch))
        return add_sums(sums), scores

    def step(self, lr_scale: float = 1.0) -> StepOutcome:
        """Clip the accumulated gradients, update the weights and forget the gradients.

        Raises:
            TrainingError: a gradient was not finite.
        """
        lr = self.lr * lr_scale
        grad_norm = step_optimizer(self.engine, lr)
        value_grad_norm = None if self.critic is None else self.critic.step(lr_scale)
        self.optimizer_steps += 1
        heap.freeze(self)  # with what the first step has compiled
        return StepOutcome(grad_norm, lr, value_grad_norm)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's whole weights by Hugging Face name, tied ones once; LoRA merged.

        Where weights stay whole they are the learner's own tensors, valid until the next `step`, or
        new ones where factors were merged; otherwise each is valid until the next is drawn, and
        every rank must draw them all.
        """
        named = policy_names(self.scorer)
        if self.adapter is None:
            return self._drawn(named)
        return self.adapter.merged(self._drawn(self.adapter.merge_order(named)))

    def _drawn(self, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        if self.keeps_whole:
            return ((name, parameter.data) for name, parameter in named)
        return gather_in_buckets(named)

    def drain_weights(self) -> None:
        """Take part in another rank's `named_weights`."""
        for _ in self.named_weights():
            pass

    def save(self, folder: Path) -> None:
        """Write this rank's state into `folder`. Not a collective.

        Raises:
            OSError: it cannot be written.
        """
        rank, world_size = self._place()
        for name, engine in self._saved_engines():
            save_rank(folder, engine, self.optimizer_steps, rank, world_size, name)

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote; raises `UsageError` as `load_rank` says."""
        saved = len({path.name.partition("-rank-")[0] for path in folder.glob("learner-*")})
        if saved not in (0, self._shards):
            raise UsageError(
                f"The checkpoint {folder} was saved with train.tensor_parallel_size {saved}, and "
                f"this run has {self._shards}: set it to {saved}."
            )
        rank, world_size = self._place()
        for name, engine in self._saved_engines():
            self.optimizer_steps = load_rank(folder, engine, rank, world_size, name)

    def _saved_engines(self) -> list[tuple[str, Any]]:
        """What trains, by the names of its files."""
        shard = f"-shard-{self.group.rank % self._shards}" if self._shards > 1 else ""
        critic = [] if self.critic is None else [(f"value{shard}", self.critic.engine)]
        return [(f"learner{shard}", self.engine), *critic]

    def _place(self) -> tuple[int, int]:
        """This rank among those that have the same shard of each layer, and their number."""
        return self.group.rank // self._shards, self.group.world_size // self._shards

    def save_pretrained(self, folder: Path) -> None:
        """Rank 0 writes the policy and its tokenizer as a Hugging Face folder.

        Raises:
            OSError: it cannot be written.
        """
        if self.group.rank != 0:
            self.drain_weights()
            return
        weights = {name: weight.to("cpu", copy=True) for name, weight in self.named_weights()}
        try:
            self.policy.save_pretrained(folder, state_dict=weights)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def save_adapter(self, folder: Path) -> None:
        """Rank 0 writes the factors of LoRA as a folder that peft loads.

        Raises:
            OSError: it cannot be written.
        """
        assert self.adapter is not None, "the learner was built without model.lora"
        drawn = self._drawn(self.adapter.factors(policy_names(self.scorer)))
        factors = {name: factor.to("cpu", copy=True) for name, factor in drawn}
        if self.group.rank == 0:
            self.adapter.save(folder, factors)

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to the host, where they are on a GPU."""
        if self.group.device.type == "cuda" and self._away is None:
            self._away = move_to_host(self.engines, self.group.device)

    def reload(self) -> None:
        """Move back what `offload` moved away."""
        if self._away is not None:
            move_back(self.engines, self._away)
            self._away = None

    @property
    def engines(self) -> list[Any]:
        """DeepSpeed's: of the policy, and of values and reference where they have their own."""
        critic = None if self.critic is None else self.critic.engine
        every = (self.engine, critic, self.reference_engine)
        return [engine for engine in every if engine is not None]

    def close(self) -> None:
        """Free what DeepSpeed holds."""
        heap.thaw(self)
        for engine in self.engines:
            end(engine)

    def _join_sequence(self, config: Config) -> SequenceGroup | None:
        size = config.train.sequence_parallel_size
        if size == 1:
            return None
        if self.sharing != "trie":
            raise UsageError(
                "train.sequence_parallel_size shares out tries, and this model or "
                f"train.prefix_sharing {config.train.prefix_sharing} runs on rows: set it to 1."
            )
        return SequenceGroup(self.group, size, self.policy)

    def _pass(self, engine: Any, micro_batch: MicroBatch) -> Pass:
        return Pass(engine, micro_batch, self.group.device, self._sequence)

    def _score_all(
        self, engine: Any, micro_batches: Sequence[MicroBatch], critic: Critic | None = None
    ) -> list[list[SampleScores]]:
        return [self._score(engine, micro_batch, critic) for micro_batch in micro_batches]

    def _score(
        self, engine: Any, micro_batch: MicroBatch, critic: Critic | None = None
    ) -> list[SampleScores]:
        scores = self._pass(engine, micro_batch).scores()
        if critic is not None:
            scores = scores.with_values(critic.values(micro_batch))
        return _split(scores, micro_batch)


def _check_shards(policy: PreTrainedModel, shards: int, world_size: int) -> None:
    text = policy.config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if shards > 1 and experts:
        raise UsageError(
            f"train.tensor_parallel_size {shards} does not share out experts, and the model has "
            f"{experts}: set it to 1."
        )
    heads = {text.num_attention_heads, text.num_key_value_heads} if shards > 1 else set()
    if world_size % shards or any(number % shards for number in heads):
        raise UsageError(
            f"train.tensor_parallel_size {shards} does not divide the number of ranks "
            f"({world_size}) and of heads ({', '.join(map(str, sorted(heads)))}): lower it."
        )


def _loss(
    scores: TokenScores, values_N: Tensor | None, terms: LossTerms, algo: AlgoConfig
) -> tuple[Tensor, Sums]:
    """The loss of the policy's scores, with the values of a value model where there is one."""
    return loss_and_sums(scores.with_values(values_N), terms, algo)


def _split(scores: TokenScores, micro_batch: MicroBatch) -> list[SampleScores]:
    """Cut [N] into the [R] of each sample, on the host."""
    ends = np.cumsum([sample.num_sampled for sample in micro_batch.samples])[:-1]
    logprobs = np.split(scores.logprobs_N.detach().cpu().numpy(), ends)
    values: list[Any] = [None] * len(micro_batch.samples)
    if scores.values_N is not None:
        values = np.split(scores.values_N.detach().cpu().numpy(), ends)
    return [SampleScores(*pair) for pair in zip(logprobs, values, strict=False)]
