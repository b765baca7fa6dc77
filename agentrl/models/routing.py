"""Which experts a mixture of experts sends each token to: noted, and replayed.

Where two experts are almost equally good for a token, the rounding of other kernels decides
differently, and the token's state is then another one altogether. Sampler and learner mean the same
policy only if the learner sends each token where the sampler did: router replay (see also
arXiv:2507.18071, on mixtures of experts). The weights of the chosen experts stay the learner's own,
with their gradient.

Shapes: N tokens of a forward pass in the order of its rows, L layers of the model, k experts of
each token, E experts.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import UsageError

__all__ = ["UNKNOWN", "Routers"]

_LAYER = re.compile(r"\blayers\.(\d+)\b")

UNKNOWN = -1
"""In place of an expert: the token goes where the model sends it."""


class Routers:
    """The routers of one model, which from here on choose what `replayed` says."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the routers and stand behind each.

        Raises:
            UsageError: the model has none, or weighs its experts in a way that is not known.
        """
        self.replayed: Tensor | None = None
        """Experts [N, L, k] of the next passes, int64, `UNKNOWN` where the model is to choose; it
        stays while activations may be computed again."""
        routers = {
            int(_LAYER.findall(name)[-1]): module
            for name, module in model.named_modules()
            if type(module).__name__.endswith("TopKRouter")
        }
        kind = f"a model of type {model.config.model_type}"
        if not routers:
            raise UsageError(f"rollout.router_replay is set, but {kind} has no experts: remove it.")
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)
        self.top_k = int(next(iter(routers.values())).top_k)
        self._chosen: dict[int, Tensor] = {}
        for layer, router in routers.items():
            _check(router, kind)
            router.register_forward_hook(self._hook(layer))

    def taken(self) -> Tensor:
        """Experts [N, L, k] of the last pass, int64; `UNKNOWN` in layers without experts."""
        nowhere = torch.full_like(next(iter(self._chosen.values())), UNKNOWN)
        layers = [self._chosen.get(layer, nowhere) for layer in range(self.num_layers)]
        return torch.stack(layers, dim=1)

    def _hook(self, layer: int) -> Any:
        def choose(router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits_NE, weights_Nk, own_Nk = output
            if self.replayed is not None:
                wanted_Nk = self.replayed[:, layer]
                own_Nk = torch.where(wanted_Nk == UNKNOWN, own_Nk, wanted_Nk)
                weights_Nk = _weights(router, logits_NE, own_Nk)
            self._chosen[layer] = own_Nk.detach()
            return logits_NE, weights_Nk, own_Nk

        return choose


def _weights(router: nn.Module, logits_NE: Tensor, chosen_Nk: Tensor) -> Tensor:
    """What the experts' outputs are weighed with: their probabilities, of all experts or, where
    the model normalises, of those chosen."""
    probabilities_NE = logits_NE.softmax(-1, dtype=torch.float32)
    weights_Nk = probabilities_NE.gather(-1, chosen_Nk)
    if getattr(router, "norm_topk_prob", True):
        weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
    return weights_Nk.to(logits_NE.dtype)


@torch.no_grad()
def _check(router: nn.Module, kind: str) -> None:
    """Compare with the router's own weights, while its parameters are whole."""
    parameter = next(router.parameters())
    if parameter.is_meta:
        return  # a skeleton; whoever trains the model has its weights
    hidden = torch.linspace(-1, 1, 3 * parameter.shape[-1], device=parameter.device)
    output = router(hidden.view(3, -1).to(parameter.dtype))
    known = isinstance(output, tuple) and len(output) == 3
    if known:
        logits_NE, weights_Nk, own_Nk = output
        known = torch.allclose(_weights(router, logits_NE, own_Nk), weights_Nk, atol=1e-3)
    if not known:
        raise UsageError(
            f"rollout.router_replay is set, but {kind} weighs its experts in a way that the "
            "learner cannot replay: set it to false."
        )
