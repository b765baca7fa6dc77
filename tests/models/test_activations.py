from types import SimpleNamespace

import pytest

from agentrl.models.activations import recompute_activations


@pytest.mark.parametrize(
    "names",
    [
        ["gradient_checkpointing_enable"],
        ["activation_checkpointing_enable"],
        ["activation_checkpointing_enable", "gradient_checkpointing_enable"],
    ],
)
def test_every_release_of_transformers_is_asked_by_the_newest_name_that_it_has(names: list[str]):
    calls: list[tuple[str, dict]] = []
    methods = {name: lambda options, name=name: calls.append((name, options)) for name in names}
    recompute_activations(SimpleNamespace(**methods))
    assert calls == [(names[0], {"use_reentrant": False})]
