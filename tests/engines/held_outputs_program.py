"""Runs under vLLM's Python: random steps of an engine, told through `HeldOutputs` and directly.

Fails where what is told differs; prints how many outputs were told of how many, a line a seed.
"""

from __future__ import annotations

import contextlib
import queue
import random
import sys
from collections import defaultdict
from types import SimpleNamespace

import agentrl_vllm_plugin
import numpy as np
from agentrl_vllm_plugin.vllm_outputs import STEPS, HeldOutputs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
from vllm.v1.outputs import LogprobsLists

VERSIONS = "weight_version" in EngineCoreOutputs.__struct_fields__
Row = tuple[int, float, int]


def logprobs_of(tokens: list[int], columns: int) -> LogprobsLists:
    """Values that say whose they are; as many columns as the whole batch has."""
    ids = np.repeat(np.array([[token] for token in tokens], dtype=np.int32), columns, axis=1)
    return LogprobsLists(ids, -ids.astype(np.float32), ids[:, 0] + 1, None)


def rows_of(found: LogprobsLists | None) -> list[Row]:
    if found is None:
        return []
    ids, values, ranks = found[:3]
    return list(zip(ids[:, 0].tolist(), values[:, 0].tolist(), ranks.tolist(), strict=True))


class Told:
    """What a client knows of each request: tokens with their version, log-probabilities, end."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.rows: dict[str, list[Row]] = defaultdict(list)
        self.ends: dict[str, str] = {}
        self.count = 0

    def add(self, output: EngineCoreOutput, version: str) -> None:
        self.count += 1
        name = output.request_id
        assert name not in self.ends, "told after its end"
        self.tokens[name] += [(token, version) for token in output.new_token_ids]
        self.rows[name] += rows_of(output.new_logprobs)
        if output.finish_reason is not None:
            self.ends[name] = str(output.finish_reason)

    def of(self, name: str) -> tuple[list[tuple[int, str]], list[Row], str | None]:
        return self.tokens[name], self.rows[name], self.ends.get(name)


class Engine:
    """Twelve requests of two clients at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.requests: dict[str, SimpleNamespace] = {}
        self.version = 0
        self.names: list[str] = []
        self.watched: set[str] = set()
        """Requests whose client looks at each token."""
        self.queue: queue.Queue[tuple[int, EngineCoreOutputs] | bytes] = queue.Queue()
        self.held = HeldOutputs(self.queue, self.requests)
        self.sent, self.told = Told(), Told()
        self.number = 0

    def add_request(self) -> None:
        streamed, stops = self.rng.random() < 0.2, self.rng.random() < 0.1
        kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
        self.names.append(name := str(len(self.names)))
        self.requests[name] = SimpleNamespace(
            sampling_params=SimpleNamespace(output_kind=kind, stop=["."] if stops else []),
            client=self.rng.randrange(2),
            logprobs=self.rng.random() < 0.5,
        )
        if streamed or stops:
            self.watched.add(name)

    def step(self) -> None:
        by_client: dict[int, list[EngineCoreOutput]] = {0: [], 1: []}
        columns = 6 if self.rng.random() < 0.05 else 1  # somebody asks for five more
        for name, request in list(self.requests.items()):
            if self.rng.random() < 0.3:
                continue  # waits
            self.number += 1
            tokens = [10 * self.number + i for i in range(self.rng.choice([1, 1, 1, 3]))]
            output = EngineCoreOutput(request_id=name, new_token_ids=tokens)
            if request.logprobs:
                output.new_logprobs = logprobs_of(tokens, columns)
            if self.rng.random() < 0.02:
                output.finish_reason = FinishReason.LENGTH
                del self.requests[name]  # as the scheduler does before it tells
            by_client[request.client].append(output)
        for client, outputs in by_client.items():
            self.tell(client, outputs)

    def tell(
        self, client: int, outputs: list[EngineCoreOutput], *, with_version: bool = True
    ) -> None:
        for output in outputs:
            self.sent.add(output, str(self.version))
        message = EngineCoreOutputs(outputs=outputs)
        if VERSIONS and with_version:
            message.weight_version = str(self.version)
        self.held.put_nowait((client, message))

    def read(self, until: bytes | None = None) -> None:
        """Take what was told so far, or up to a last word."""
        while until is not None or not self.queue.empty():
            item = self.queue.get_nowait()
            if item == until:
                return
            assert isinstance(item, tuple), item
            client, message = item
            assert client in (0, 1), client
            for output in message.outputs:
                # Only the end of a request comes without a version, and then without a token.
                label = message.weight_version or "none" if VERSIONS else str(self.version)
                self.told.add(output, label)

    def check(self, names: list[str] | set[str]) -> None:
        for name in names:
            assert self.told.of(name) == self.sent.of(name), name

    def something_happens(self) -> None:
        chance = self.rng.random()
        if chance < 0.02 and self.requests:  # a pause that aborts
            name = self.rng.choice(list(self.requests))
            end = EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT)
            self.tell(self.requests.pop(name).client, [end], with_version=False)
        elif chance < 0.03 and self.requests:  # its client gave it up: the engine says no more
            self.requests.pop(self.rng.choice(list(self.requests)))
        elif chance < 0.04:
            answer = EngineCoreOutputs(utility_output=UtilityOutput(call_id=1))
            self.held.put_nowait((0, answer))
            self.read()
            self.check(self.names)
        elif chance < 0.06 and VERSIONS:
            self.version += 1


def check_an_id_that_is_used_again() -> None:
    requests: dict[str, SimpleNamespace] = {}
    told: queue.Queue[tuple[int, EngineCoreOutputs]] = queue.Queue()
    held = HeldOutputs(told, requests)
    whole = SimpleNamespace(output_kind=RequestOutputKind.FINAL_ONLY, stop=[])
    for token in (111, 222):  # the first was given up
        requests["a"] = SimpleNamespace(sampling_params=whole)
        held.put_nowait((0, EngineCoreOutputs(outputs=[EngineCoreOutput("a", [token])])))
    last = EngineCoreOutput("a", [333], finish_reason=FinishReason.LENGTH)
    held.put_nowait((0, EngineCoreOutputs(outputs=[last])))
    assert [out.new_token_ids for out in told.get_nowait()[1].outputs] == [[222, 333]]


def check_that_death_is_told_in_any_case() -> None:
    told: queue.Queue[bytes] = queue.Queue()
    held = HeldOutputs(told, {})
    held._held[0] = {"a": None}  # type: ignore[dict-item]
    with contextlib.suppress(AttributeError):
        held.put_nowait(b"ENGINE_CORE_DEAD")
    assert told.get_nowait() == b"ENGINE_CORE_DEAD"


def main(seed: int) -> None:
    engine = Engine(seed)
    for _ in range(400):
        while len(engine.requests) < 12:
            engine.add_request()
        engine.step()
        engine.read()
        engine.check(engine.watched | engine.sent.ends.keys())
        engine.something_happens()
    engine.read()
    engine.check(engine.watched | engine.sent.ends.keys())
    for _ in range(STEPS):  # what is left of requests that were given up
        engine.step()
    engine.read()
    engine.check([name for name in engine.names if name not in engine.requests])
    engine.held.put_nowait(b"ENGINE_CORE_DEAD")
    engine.read(until=b"ENGINE_CORE_DEAD")
    engine.check(engine.names)
    assert engine.held.empty()
    print(engine.told.count, engine.sent.count)


if __name__ == "__main__":
    agentrl_vllm_plugin.register()
    check_an_id_that_is_used_again()
    check_that_death_is_told_in_any_case()
    for word in sys.argv[1:]:
        main(int(word))
