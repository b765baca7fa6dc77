"""The policy as the learner calls it: log-probability, entropy and value of each sampled token.

The language-model head runs on the hidden states that predict sampled tokens only, in chunks that
are computed again in the backward pass, so that logits never exist for the whole batch. The value
head is a linear layer of its own on the same hidden states.

Log-probabilities are those of the sampling distribution: softmax of logits / temperature, each
token's own, in float32. Truncation (top-p, top-k) is not replayed: they are of the whole
distribution.

Shapes: B sequences, T inputs, H hidden size, V vocabulary, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl.errors import UsageError
from agentrl.models.routing import Routers
from agentrl.train.tree_attention import TreePlan

__all__ = [
    "POLICY_PREFIX",
    "TokenScorer",
    "TokenScores",
    "hidden_states",
    "policy_names",
    "value_head_for",
]

POLICY_PREFIX = "policy."
"""What the names of the policy's parameters begin with inside a `TokenScorer`."""


class TokenScores(NamedTuple):
    """Per sampled token: log-probability [N], entropy of its distribution [N], value [N].

    All float32; the values are None without a value head.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    values_N: Tensor | None

    def with_values(self, values_N: Tensor | None) -> TokenScores:
        """The same with these values; None: with those that are there."""
        return self if values_N is None else self._replace(values_N=values_N)

    def expand(self, expand_R: Tensor | None) -> TokenScores:
        """Give each sampled token [R] the scores of its question in [N]; None: they are the same.

        A question that several tokens ask gets the gradients of all of them.
        """
        if expand_R is None:
            return self
        values_N = self.values_N
        return TokenScores(
            self.logprobs_N.index_select(0, expand_R),
            self.entropy_N.index_select(0, expand_R),
            None if values_N is None else values_N.index_select(0, expand_R),
        )


class TokenScorer(nn.Module):
    """Wraps a causal language model; its `forward` is all that training and scoring call."""

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        temperature: float,
        value_head: bool = False,
        router_replay: bool = False,
    ) -> None:
        """Take over `policy`; with `router_replay` its experts can be chosen for it.

        Raises:
            UsageError: the model does something between hidden states and logits that this
                module does not know, so that its log-probabilities would be wrong; or it has no
                experts that can be replayed.
        """
        super().__init__()
        self.policy = policy
        self.temperature = temperature
        text_config = policy.config.get_text_config()
        self.softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        self.value_head: nn.Linear | None = None
        if value_head:
            self.value_head = value_head_for(policy)
        self.routers = Routers(policy) if router_replay else None
        self._check_head()

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
        """Score the tokens `targets_N` from the hidden states at `index_N` (in B * T).

        Args:
            input_ids_BT: int64, padded on the right; no mask is needed under causal attention. With
                `tree`, one row of nodes.
            index_N: int64, position of the hidden state that predicts each token.
            targets_N: int64, the tokens.
            head_chunks: into how many parts the head's work is cut.
            entropy_grad: whether the entropy takes part in the backward pass.
            tree: what each node attends to, where the policy's attention is `TREE_ATTENTION`.
            positions_BT: int64, where rows hold several sequences: the positions within each.
            temperatures_N: float32, above 0, in place of the scorer's own temperature.
            routes: int64 [B * T, layers, k], the experts to replay (see `models.routing`).
        """
        if self.routers is not None:
            self.routers.replayed = routes
        hidden_NH = hidden_states(self.policy.base_model, input_ids_BT, index_N, tree, positions_BT)
        if temperatures_N is None:
            temperatures_N = torch.full_like(index_N, self.temperature, dtype=torch.float32)
        split = [x.tensor_split(head_chunks) for x in (hidden_NH, targets_N, temperatures_N)]
        parts = []
        for chunk in zip(split[0], split[1], split[2], strict=True):
            if head_chunks > 1 and torch.is_grad_enabled():
                parts.append(checkpoint(self._score, *chunk, entropy_grad, use_reentrant=False))
            else:
                parts.append(self._score(*chunk, entropy_grad))
        logprobs, entropies = zip(*parts, strict=True)
        values_N = None
        if self.value_head is not None:
            values_N = self.value_head(hidden_NH).squeeze(-1).float()
        return TokenScores(torch.cat(logprobs), torch.cat(entropies), values_N)

    def _score(
        self, hidden_NH: Tensor, targets_N: Tensor, temperatures_N: Tensor, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        logits_NV = self.policy.get_output_embeddings()(hidden_NH)
        score = _compiled_scores() if logits_NV.is_cuda else _scores
        scores: tuple[Tensor, Tensor] = score(
            logits_NV, targets_N, temperatures_N, self.softcap, entropy_grad
        )
        return scores

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare with the model's own logits on a few tokens, while its weights are whole."""
        device = next(self.policy.parameters()).device
        ids_BT = torch.arange(1, 5, device=device).unsqueeze(0)
        hidden_BTH = self.policy.base_model(input_ids=ids_BT, use_cache=False)[0]
        own_BTV = self.policy(input_ids=ids_BT, use_cache=False).logits.float()
        logits_BTV = self.policy.get_output_embeddings()(hidden_BTH)
        if not torch.allclose(_capped(logits_BTV, self.softcap), own_BTV, rtol=1e-3, atol=1e-4):
            raise UsageError(
                f"{type(self.policy).__name__} scales its logits in a way that the learner does "
                "not know, so that it would train on wrong log-probabilities: choose another "
                "--model.path."
            )


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits in float32, squeezed into -softcap to softcap if there is one."""
    logits = logits.float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _scores(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    softcap: float | None,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probability [N] of each target and entropy [N] of its distribution, float32."""
    scaled_NV = _capped(logits_NV, softcap) / temperatures_N.unsqueeze(-1)
    log_probs_NV = scaled_NV.log_softmax(-1)
    seen_NV = log_probs_NV if entropy_grad else log_probs_NV.detach()
    entropy_N = -(seen_NV.exp() * seen_NV).sum(-1)
    return log_probs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1), entropy_N


@cache
def _compiled_scores() -> Callable[..., tuple[Tensor, Tensor]]:
    """`_scores` without the float32 copies of the logits that it would write to a GPU's memory."""
    return torch.compile(_scores, dynamic=True)


def value_head_for(model: PreTrainedModel) -> nn.Linear:
    """A head on the hidden states of `model`. It gives 0 at first: the first advantages are then
    those of no baseline, not of noise."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=model.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def hidden_states(
    body: nn.Module,
    input_ids_BT: Tensor,
    index_N: Tensor,
    tree: TreePlan | None,
    positions_BT: Tensor | None,
) -> Tensor:
    """Run a model's body and pick the hidden states [N, H] at `index_N`; the arguments are those of
    `TokenScorer.forward`."""
    extra: dict[str, Any] = {} if positions_BT is None else {"position_ids": positions_BT}
    if tree is not None:
        extra = {"position_ids": tree.positions_1T, "agentrl_tree": tree}
    hidden_BTH: Tensor = body(input_ids=input_ids_BT, use_cache=False, **extra)[0]
    return hidden_BTH.flatten(0, 1).index_select(0, index_N)


def policy_names(scorer: TokenScorer) -> list[tuple[str, nn.Parameter]]:
    """The policy's parameters by their Hugging Face names, tied ones once, without the value head.

    Call it while or after the scorer is partitioned alike: names and order do not change.
    """
    return [
        (name.removeprefix(POLICY_PREFIX), parameter)
        for name, parameter in scorer.named_parameters()
        if name.startswith(POLICY_PREFIX)
    ]
