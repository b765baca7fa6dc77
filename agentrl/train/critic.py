"""A value model of its own: a second copy of the policy's body with a value head, both trained.

It starts from the weights of the policy before training, has its own optimizer and learning rate,
and sees the same micro-batches. Its gradient is that of the value loss alone.

Shapes: B rows, T inputs, N questions to the model.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.config import AlgoConfig, Config
from agentrl.models.activations import recompute_activations
from agentrl.train.distributed import RankGroup
from agentrl.train.microbatch import MicroBatch
from agentrl.train.objective import LossTerms, Sums, weighted_value_loss
from agentrl.train.optimizer import build_optimizer
from agentrl.train.passes import Pass
from agentrl.train.scorer import TokenScores, hidden_states, value_head_for
from agentrl.train.sequence_parallel import SequenceGroup
from agentrl.train.tree_attention import TreePlan
from agentrl.train.zero import start_training, step_optimizer

__all__ = ["Critic", "ValueScorer"]


class ValueScorer(nn.Module):
    """Wraps the body of a causal language model; its scores are values alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over the body of `model`; its language-model head is not kept."""
        super().__init__()
        self.body = model.base_model
        self.value_head = value_head_for(model)

    def forward(
        self,
        input_ids_BT: Tensor,
        index_N: Tensor,
        targets_N: Tensor,
        head_chunks: int = 1,
        entropy_grad: bool = False,
        tree: TreePlan | None = None,
        positions_BT: Tensor | None = None,
        temperatures_N: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> TokenScores:
        """The values of the states at `index_N`, called as `TokenScorer.forward` is.

        Log-probabilities and entropy are 0.
        """
        hidden_NH = hidden_states(self.body, input_ids_BT, index_N, tree, positions_BT)
        values_N = self.value_head(hidden_NH).squeeze(-1).float()
        nothing_N = values_N.new_zeros(len(index_N))
        return TokenScores(nothing_N, nothing_N, values_N)


class Critic:
    """The value model under ZeRO-3 on one rank. Every method is a collective."""

    def __init__(
        self,
        group: RankGroup,
        model: PreTrainedModel,
        config: Config,
        *,
        attention: str | None,
        sequence: SequenceGroup | None,
    ) -> None:
        """Take over `model`, with the attention and the ranks that the policy runs with too."""
        if attention is not None:
            model.set_attn_implementation(attention)
        if config.train.gradient_checkpointing:
            recompute_activations(model)
        scorer = ValueScorer(model)
        self._lr = config.algo.value.lr or config.train.lr
        optimizer = build_optimizer(scorer, config.train, lr=self._lr)
        self._group, self._sequence = group, sequence
        self._scale = group.world_size / config.train.tensor_parallel_size
        self.engine = start_training(scorer, optimizer, config.train, world_size=group.world_size)

    def values(self, micro_batch: MicroBatch) -> Tensor | None:
        """Values [R] of the states in which each token was sampled."""
        return self._pass(micro_batch).scores().values_N

    def learn(
        self, micro_batch: MicroBatch, terms: LossTerms, algo: AlgoConfig, *, is_last: bool
    ) -> Tensor:
        """Add the gradient of the value loss to what is there; returns the values [R]."""
        scores, _ = self._pass(micro_batch).backward(
            partial(_loss, terms=terms, algo=algo),
            entropy_grad=False,
            is_last=is_last,
            scale=self._scale,
        )
        return _values(scores).detach()

    def _pass(self, micro_batch: MicroBatch) -> Pass:
        return Pass(self.engine, micro_batch, self._group.device, self._sequence)

    def step(self, lr_scale: float) -> float:
        """Step the optimizer; the norm of the gradient. See `zero.step_optimizer`."""
        return step_optimizer(self.engine, self._lr * lr_scale)


def _loss(scores: TokenScores, terms: LossTerms, algo: AlgoConfig) -> tuple[Tensor, Sums]:
    return algo.value.coef * weighted_value_loss(_values(scores), terms, algo), {}


def _values(scores: TokenScores) -> Tensor:
    assert scores.values_N is not None, "a value model gives values"
    return scores.values_N
