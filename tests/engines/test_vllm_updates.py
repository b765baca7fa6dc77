"""The plugin's updates: loaded, loaded and proven, then copied; and what ends the copying.

vLLM itself is not installed here: its modules are stand-ins, and a reload writes new values to
every layer's own tensors, as that of vLLM does.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engines.loaders import FusedModel, Named, bytes_of, new_weights, split
from torch import nn

from agentrl.engines.transport.shared_memory import SharedBuffer, share_parts


class Reload:
    """What vLLM does before and after the loader of the model, which it counts."""

    def __init__(self) -> None:
        self.began = self.ended = 0
        self.spoils = False

    def initialize(self, model: nn.Module) -> None:
        self.began += 1

    def finalize(self, model: Any, config: object) -> None:
        self.ended += 1
        if self.spoils:
            model.norm.data.mul_(2)


class TransferEngine:
    """The part of vLLM's base class that the plugin leans on."""

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def __init__(self, model: nn.Module) -> None:
        self.model, self.model_config = model, None
        self.device = torch.device("cpu")
        self.parallel_config = SimpleNamespace(enable_eplb=False)

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)  # type: ignore[attr-defined]


@pytest.fixture
def reload() -> Reload:
    return Reload()


@pytest.fixture
def engine(reload: Reload, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's engine with a model that holds no numbers yet."""
    layerwise = SimpleNamespace(get_layerwise_info=lambda layer: SimpleNamespace(can_load=bool))
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": TransferEngine,
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": object},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": reload.initialize,
            "finalize_layerwise_reload": reload.finalize,
            "layerwise": layerwise,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace()},
        "vllm.v1.worker.worker_base": {"WorkerBase": object},
        # Another matter, with tests of its own.
        "agentrl.engines.vllm_outputs": {"hold_outputs": None},
    }
    for name, content in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    plugin = importlib.import_module("agentrl.engines.vllm_plugin")
    yield plugin.WeightEngine(FusedModel())
    del sys.modules["agentrl.engines.vllm_plugin"]


def info_of(bucket: Named, buffer: SharedBuffer) -> dict[str, Any]:
    """What the learner tells of a bucket of float32."""
    return {
        "buckets": [[(name, "float32", list(tensor.shape)) for name, tensor in bucket]],
        "memory": {"name": buffer.name, "handle": share_parts(buffer.flat)},
    }


def send(engine: Any, bucket: Named, call: Any = None) -> None:
    """Give the engine a bucket, by its own `update_weights` or another call."""
    buffer = SharedBuffer.allocate(1 << 13, torch.device("cpu"))
    flat = torch.cat([tensor.flatten() for _, tensor in bucket]).view(torch.uint8)
    buffer.flat[: len(flat)].copy_(flat)
    (call or engine.update_weights)(info_of(bucket, buffer))
    buffer.flat.fill_(255)  # the learner writes the next bucket there


def update(engine: Any, weights: Named, size: int = 4) -> None:
    engine.start_weight_update()
    for bucket in split(weights, size):
        send(engine, bucket)
    engine.finish_weight_update()


def assert_holds(engine: Any, weights: Named) -> None:
    expected = FusedModel()
    expected.load_weights(weights)
    assert bytes_of(engine.model) == bytes_of(expected)


def updated(engine: Any, count: int) -> None:
    for seed in range(count):
        update(engine, new_weights(seed))


def test_the_third_update_and_all_later_ones_are_copies(
    engine: Any, reload: Reload, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for seed, loads in enumerate([1, 2, 2, 2]):
        update(engine, new_weights(seed), size=seed + 2)
        assert_holds(engine, new_weights(seed))
        assert (reload.began, reload.ended) == (loads, loads)
    assert caplog.messages == ["weights are copied in place from now on: 11 copies"]


def test_copies_bring_back_all_of_weights_that_were_discarded(engine: Any, reload: Reload) -> None:
    updated(engine, 2)
    for parameter in engine.model.parameters():  # asleep, without a copy on the host
        parameter.data.fill_(torch.nan)
    update(engine, new_weights(3))
    assert_holds(engine, new_weights(3))
    assert reload.ended == 2


def test_an_engine_that_changes_what_was_loaded_goes_on_loading(
    engine: Any, reload: Reload, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reload.spoils = True
    updated(engine, 4)
    assert reload.ended == 4
    (message,) = caplog.messages
    assert message.startswith("weights go through the loader in every update: the engine computes")


def test_the_model_keeps_no_memory_of_a_bucket_that_was_copied(engine: Any) -> None:
    updated(engine, 2)
    engine.start_weight_update()
    ((name, tensor),) = [pair for pair in new_weights(7) if pair[0] == "down"]
    send(engine, [(name, tensor)])
    assert torch.equal(engine.model.down, tensor)


def test_memories_that_later_ones_have_replaced_are_closed(engine: Any) -> None:
    """Those of a failed update would take a part of the GPU for good."""
    engine.start_weight_update()
    buffers = [SharedBuffer.allocate(64, torch.device("cpu")) for _ in range(3)]
    for i in (0, 1, 0, 1, 2, 1):
        buffers[i].flat.view(torch.float32)[:8].fill_(i)
        engine.update_weights(info_of([("norm", torch.empty(8))], buffers[i]))
        assert engine.model.norm.tolist() == [i] * 8
    assert list(engine._opened) == [buffers[1].name, buffers[2].name]


def test_a_weight_that_did_not_come_is_an_error_and_the_next_update_is_loaded(
    engine: Any, reload: Reload
) -> None:
    updated(engine, 2)
    with pytest.raises(
        RuntimeError,
        match=r"2 weights did not come .* earlier updates \(head, norm\): update again",
    ):
        update(engine, new_weights(3)[:-2])
    update(engine, new_weights(4))
    assert reload.ended == 3
    assert_holds(engine, new_weights(4))


@pytest.mark.parametrize("shape", [(8,), (9,)])
def test_a_weight_that_was_not_planned_is_an_error_and_the_next_update_is_loaded(
    engine: Any, reload: Reload, shape: tuple[int, ...]
) -> None:
    updated(engine, 2)
    name = "bias" if shape == (8,) else "norm"
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match=rf"{name} .* was not among the weights"):
        send(engine, [(name, torch.zeros(shape))])
    for seed, loads in [(4, 3), (5, 4), (6, 4)]:
        update(engine, new_weights(seed))
        assert reload.ended == loads
        assert_holds(engine, new_weights(seed))


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_an_update_that_is_given_up_changes_nothing_for_the_next(
    engine: Any, reload: Reload, before: int
) -> None:
    updated(engine, before)
    engine.start_weight_update()
    send(engine, new_weights(8)[:5])
    with pytest.raises(RuntimeError, match="abandoned"):
        engine.update_weights({"buckets": [], "abandon": True})
    for seed in range(before, 4):
        update(engine, new_weights(seed))
        assert_holds(engine, new_weights(seed))
    assert reload.ended == 2


def test_a_parameter_that_has_moved_is_loaded_and_planned_anew(
    engine: Any, reload: Reload, caplog: pytest.LogCaptureFixture
) -> None:
    updated(engine, 2)
    caplog.set_level(logging.INFO)
    old = engine.model.norm.data
    engine.model.norm.data = old.clone()
    for seed, loads in [(4, 3), (5, 4), (6, 4)]:
        update(engine, new_weights(seed))
        assert reload.ended == loads
        assert_holds(engine, new_weights(seed))
    assert caplog.messages[0].startswith("weights are loaded again: the parameters")


def test_another_set_of_weights_in_the_second_update_is_the_one_that_is_planned(
    engine: Any, reload: Reload
) -> None:
    update(engine, new_weights(0))
    for seed in (1, 2, 3):  # the tied head, which the loader passes over, does not come any more
        update(engine, new_weights(seed)[:-1])
    assert_holds(engine, new_weights(3))
    assert reload.ended == 3


def test_an_engine_whose_experts_change_places_goes_on_loading(engine: Any, reload: Reload) -> None:
    engine.parallel_config.enable_eplb = True
    engine.model = FusedModel()
    updated(engine, 4)
    assert reload.ended == 4


def test_another_model_is_loaded_by_itself(engine: Any, reload: Reload) -> None:
    updated(engine, 2)
    engine.model = FusedModel()
    update(engine, new_weights(5))
    assert reload.ended == 3
    assert_holds(engine, new_weights(5))


class Worker:
    """A worker of vLLM: it keeps books of whether an update is open."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.open = engine, False

    def start_weight_update(self) -> None:
        if self.open:
            raise RuntimeError("an update is open")
        self._engine.start_weight_update()
        self.open = True

    def update_weights(self, info: dict[str, Any]) -> None:
        if not self.open:
            raise RuntimeError("no update is open")
        try:
            self._engine.update_weights(info)
        except BaseException:
            self.open = False
            raise

    def finish_weight_update(self) -> None:
        self._engine.finish_weight_update()
        self.open = False


def send_part(worker: Worker, bucket: Named, update_id: str, parts: int) -> None:
    receive = sys.modules["agentrl.engines.vllm_plugin"].receive_part
    send(None, bucket, lambda info: receive(worker, info, update_id, parts))


def test_parts_open_and_close_their_update_in_any_order(engine: Any, reload: Reload) -> None:
    worker = Worker(engine)
    for seed, loads in enumerate([1, 2, 2, 2]):
        buckets = list(split(new_weights(seed), seed + 3))
        for bucket in reversed(buckets) if seed > 1 else buckets:
            send_part(worker, bucket, f"update {seed}", len(buckets))
        assert_holds(engine, new_weights(seed))
        assert (reload.began, reload.ended, worker.open) == (loads, loads, False)


def test_parts_of_an_update_that_was_given_up_are_thrown_away(engine: Any, reload: Reload) -> None:
    worker = Worker(engine)
    first, *_ = split(new_weights(9), 5)
    for update_id, weights in (("a", new_weights(0)), ("b", new_weights(1)), ("c", new_weights(2))):
        send_part(worker, first, f"half of {update_id}", 3)
        assert worker.open
        send_part(worker, weights, update_id, 1)
        assert_holds(engine, weights)
        assert not worker.open


def test_a_part_too_many_is_an_error(engine: Any) -> None:
    worker = Worker(engine)
    send_part(worker, new_weights(0), "a", 1)
    with pytest.raises(RuntimeError, match="no update is open"):
        send_part(worker, new_weights(0), "a", 1)


def test_a_part_that_fails_ends_its_update(engine: Any) -> None:
    updated(engine, 2)
    worker = Worker(engine)
    with pytest.raises(RuntimeError, match="was not among the weights"):
        send_part(worker, [("norm", torch.zeros(9))], "a", 2)
    with pytest.raises(RuntimeError, match="no update is open"):
        send_part(worker, new_weights(0), "a", 2)
    send_part(worker, new_weights(5), "b", 1)
    assert_holds(engine, new_weights(5))
