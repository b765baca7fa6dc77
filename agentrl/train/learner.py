"""The learner as the training loop sees it: a few calls on rank 0, whatever number of ranks.

Rank 0 holds the data. Each call cuts it, sends every rank its share, does its own, and puts the
results back in the order of the samples; the other ranks `follow` until the learner is closed. The
loss is a sum whose weights were fixed for the whole optimizer step, so that a step does not depend
on how the batch was cut or on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl import heap
from agentrl.config import AlgoConfig, Config
from agentrl.engines.base import WeightSource
from agentrl.errors import AgentRLError, SaveError
from agentrl.models.load import load_policy, load_tokenizer
from agentrl.train.batch import Sample
from agentrl.train.distributed import RankGroup
from agentrl.train.flops import peak_flops
from agentrl.train.microbatch import MicroBatch
from agentrl.train.objective import Sums, add_sums
from agentrl.train.row_plan import plan_rows
from agentrl.train.trie_plan import plan_tries
from agentrl.train.worker import LearnerWorker, SampleScores, StepOutcome

__all__ = ["Learner", "build_learner"]

Floats = NDArray[np.float32]


def build_learner(config: Config) -> Learner:
    """Connect the ranks, load what `config.model` names and build the learner on every rank.

    With `algo.kl.coef` > 0 the model as loaded is also the reference policy; under LoRA that is
    the policy without its factors, and no second model. With `algo.value.model separate` one more
    gives the values.

    Raises:
        UsageError: as `load_policy` and `load_tokenizer`.
    """
    group = RankGroup()
    tokenizer = load_tokenizer(config.model)
    policy = load_policy(config.model, config.train.seed)
    reference = None
    if config.algo.kl.coef > 0 and not config.model.lora.rank:
        reference = load_policy(config.model, config.train.seed)
    value_model = None
    if config.algo.value.model == "separate":
        value_model = load_policy(config.model, config.train.seed)
    return Learner(
        policy,
        config,
        group=group,
        tokenizer=tokenizer,
        reference=reference,
        value_model=value_model,
    )


class Learner:
    """Trains the policy. Build it on every rank; then rank 0 calls, the others `follow`."""

    def __init__(
        self,
        policy: PreTrainedModel,
        config: Config,
        *,
        group: RankGroup | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: PreTrainedModel | None = None,
        value_model: PreTrainedModel | None = None,
    ) -> None:
        """Take over the models: from here on only the learner may call them."""
        self.group = group or RankGroup()
        self.config = config
        self.policy_config = policy.config
        self.generation_config = policy.generation_config
        self.tokenizer = tokenizer
        self._worker = LearnerWorker(
            self.group,
            policy,
            config,
            tokenizer=tokenizer,
            reference=reference,
            value_model=value_model,
        )
        self._usable, self._closed = True, False

    @property
    def optimizer_steps(self) -> int:
        """How often the weights were updated, over all runs that were resumed."""
        return self._worker.optimizer_steps

    @property
    def peak_flops(self) -> float | None:
        """Operations a second that the cards of all ranks could do; None where that is unknown."""
        if self.group.device.type != "cuda":
            return None
        card = peak_flops(torch.cuda.get_device_name(self.group.device), self.config.model.dtype)
        return None if card is None else card * self.group.world_size

    def follow(self) -> None:
        """Do this rank's share of every call that rank 0 makes, until it closes the learner."""
        call: tuple[str, tuple[Any, ...]] | None
        while (call := self.group.scatter()) is not None:
            self._do_share(*call)
        self._worker.close()

    def score(self, samples: Sequence[Sample]) -> list[SampleScores]:
        """Log-probabilities (and values, with a value head) under the current policy, in order."""
        return self._score_all("score", samples)

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probabilities [R] of each sample under the current policy, in order."""
        return [scores.logprobs for scores in self.score(samples)]

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Values [R] of the states in which each sample's tokens were sampled, in order."""
        values = [scores.values for scores in self.score(samples)]
        assert all(value is not None for value in values), "this estimator has no value head"
        return [value for value in values if value is not None]

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probabilities [R] of each sample under the reference policy, in order."""
        return [scores.logprobs for scores in self._score_all("score_reference", samples)]

    def forward_backward(
        self, samples: Sequence[Sample], algo: AlgoConfig
    ) -> tuple[Sums, list[SampleScores]]:
        """Add the gradient of the loss of `samples` to what has accumulated since `step`.

        Samples carry advantages and weights; the weights are those of the whole optimizer step.

        Returns:
            Sums (`objective.means` makes metrics of them) and the scores of each sample under the
            current policy, in order.
        """
        plan = self._plan(samples)
        results = self._call_shares("forward_backward", plan, algo)
        scores = _in_order(plan, [scores for _, scores in results], len(samples))
        return add_sums(sums for sums, _ in results), scores

    def step(self, lr_scale: float = 1.0) -> StepOutcome:
        """Update the weights with the accumulated gradient, clipped to `train.max_grad_norm`.

        Args:
            lr_scale: what the configured learning rate is multiplied by (`optimizer.lr_scale`).

        Raises:
            TrainingError: the gradient was not finite.
        """
        outcome: StepOutcome = self._call("step", [(lr_scale,)] * self.group.world_size)[0]
        return outcome

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's whole weights by Hugging Face name, tied ones once; LoRA merged.

        Exhaust it before the next call. With one rank (without `train.offload all`) the tensors are
        the learner's own and valid until the next `step`; else each is valid until the next is
        drawn.
        """
        if self.group.world_size > 1:
            self.group.scatter([("drain_weights", ())] * self.group.world_size)
        yield from self._worker.named_weights()
        self._collect(None)

    def weight_source(self, version: int) -> WeightSource:
        """The current weights for an engine, LoRA merged; live (no copy) where they stay whole."""
        return WeightSource(
            self.named_weights,
            version,
            live=self._worker.keeps_whole,
            save_adapter=self.save_adapter if self.config.model.lora.rank else None,
        )

    def offload(self) -> None:
        """Give GPU memory to others: weights and states wait in host memory until `reload`.

        Nothing else may be called meanwhile. Without a GPU there is nothing to give.
        """
        self._call("offload", [()] * self.group.world_size)

    def reload(self) -> None:
        """Take back what `offload` gave; the learner goes on as if nothing had been."""
        self._call("reload", [()] * self.group.world_size)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random states into `folder`, which exists.

        Raises:
            SaveError: a rank could not write.
        """
        self._call("save", [(folder,)] * self.group.world_size)

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote with the same model: bit for bit on as many ranks, and with
        the same optimizer state on any number.

        Raises:
            UsageError: the state is missing, broken, or of another model.
        """
        self._call("load", [(folder,)] * self.group.world_size)

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder that `from_pretrained` loads, tokenizer and generation config included.

        Raises:
            SaveError: it could not be written.
        """
        self._call("save_pretrained", [(folder,)] * self.group.world_size)

    def save_adapter(self, folder: Path) -> None:
        """Write the factors of LoRA alone into `folder`, as peft and vLLM load them.

        Raises:
            SaveError: it could not be written.
        """
        self._call("save_adapter", [(folder,)] * self.group.world_size)

    def close(self) -> None:
        """Let the other ranks go and free what the learner holds. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._usable:
            self._usable = False
            self.group.scatter([None] * self.group.world_size)
        elif self.group.world_size > 1:
            heap.thaw(self._worker)  # the ranks are out of step: to free the rest could hang
            return
        self._worker.close()

    def _plan(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        text_config = self.policy_config.get_text_config()
        world_size = self.group.world_size // self._together
        train = self.config.train
        max_tokens = train.max_tokens_per_gpu * train.sequence_parallel_size
        vocab_size = text_config.vocab_size
        if self._worker.sharing == "trie":
            return plan_tries(
                samples,
                world_size=world_size,
                max_tokens=max_tokens,
                vocab_size=vocab_size,
                # A layer has about 12 * hidden^2 weights; a pair of tokens costs it 2 * hidden.
                token_cost=6 * text_config.hidden_size,
            )
        return plan_rows(
            samples,
            world_size=world_size,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            packed=self._worker.sharing == "packed",
        )

    @property
    def _together(self) -> int:
        """How many ranks compute the same micro-batches."""
        return self.config.train.sequence_parallel_size * self.config.train.tensor_parallel_size

    def _score_all(self, method: str, samples: Sequence[Sample]) -> list[SampleScores]:
        plan = self._plan(samples)
        results = self._call_shares(method, plan)
        return _in_order(plan, results, len(samples))

    def _call_shares(
        self, method: str, plan: Sequence[list[MicroBatch]], *further: Any
    ) -> list[Any]:
        """Run a method of the worker on each share of a plan; what came of each share.

        All ranks that compute sequences or layers together get the same share and have the same
        results.
        """
        size = self._together
        results = self._call(method, [(share, *further) for share in plan for _ in range(size)])
        return results[::size]

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run a method of the worker on every rank, each with its own arguments."""
        call = self.group.scatter([(method, args) for args in arguments])
        return self._do_share(*call)

    def _do_share(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """Run this rank's part and hand the outcome in, a failure too: nobody waits for it."""
        outcome: Any
        try:
            outcome = getattr(self._worker, method)(*args)
        except AgentRLError as error:
            outcome = error
        except OSError as error:
            outcome = SaveError(
                f"Rank {self.group.rank} could not write to {args[-1]} ({error.strerror or error})"
                ": free some space or check the permissions, then go on with --resume."
            )
        except BaseException:
            # The ranks are out of step now: a message to the others could wait for ever.
            self._usable = False
            raise
        return self._collect(outcome)

    def _collect(self, outcome: Any) -> list[Any]:
        outcomes = self.group.gather(outcome)
        for each in outcomes:
            if isinstance(each, AgentRLError):
                raise each
        return outcomes


def _in_order(
    plan: Sequence[Sequence[MicroBatch]],
    results: Sequence[Sequence[Sequence[SampleScores]]],
    count: int,
) -> list[SampleScores]:
    """Put results by rank and micro-batch back at the places that the plan took samples from."""
    ordered: dict[int, SampleScores] = {}
    for share, share_results in zip(plan, results, strict=True):
        for micro_batch, scores in zip(share, share_results, strict=True):
            ordered.update(zip(micro_batch.indices, scores, strict=True))
    return [ordered[index] for index in range(count)]
