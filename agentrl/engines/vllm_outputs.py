"""Runs inside vLLM's engine process: what a request has sampled is told when it ends.

After each step vLLM tells its API servers one token of every request, log-probabilities as three
arrays. They wait for the end of a request that is not streamed, but packing, sending and unpacking
take more of a step than a GPU needs for a small model. Here tokens are held until the request ends
or is ended, the weights change their version, somebody is answered (a pause, a sleep), or `STEPS`
steps have passed. Nothing is told in another order, and nothing is lost but to a client that ends
its own request (`/abort_requests`): it gets what was told until then.

It is copied beside `vllm_plugin.py`, and may import numpy and vLLM alone.
"""

# mypy: ignore-errors
# vLLM is not installed where types are checked.

from __future__ import annotations

import operator
import threading
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine import core as engine_core

__all__ = ["HeldOutputs", "hold_outputs"]

STEPS = 64
"""Outputs of a client are held for as many steps at most: requests may be gone meanwhile."""


def _fields(struct: type, without: set[str]) -> tuple[operator.attrgetter, tuple[Any, ...]]:
    """A getter of a struct's other fields, which all have defaults, and these."""
    names, defaults = struct.__struct_fields__, struct.__struct_defaults__
    default_of = dict(zip(names[-len(defaults) :], defaults, strict=True))
    rest = [name for name in names if name not in without]
    return operator.attrgetter(*rest), tuple(default_of[name] for name in rest)


_more_than_tokens, _NO_MORE = _fields(
    EngineCoreOutput, {"request_id", "new_token_ids", "new_logprobs"}
)
_more_than_outputs, _NOTHING = _fields(
    EngineCoreOutputs, {"engine_index", "outputs", "timestamp", "weight_version"}
)


def hold_outputs() -> None:
    """Have every engine of this process hold its outputs from when it begins to work."""
    for engine in (engine_core.EngineCoreProc, engine_core.DPEngineCoreProc):
        if "run_busy_loop" in vars(engine):
            engine.run_busy_loop = _holding(engine.run_busy_loop)


def _holding(run_busy_loop: Any) -> Any:
    def run(self: Any) -> None:
        if not isinstance(self.output_queue, HeldOutputs):
            self.output_queue = HeldOutputs(self.output_queue, self.scheduler.requests)
        run_busy_loop(self)

    return run


class _Entry:
    """What is held of one request."""

    __slots__ = ("logprobs", "output", "request", "tokens")

    def __init__(self, output: EngineCoreOutput, request: Any) -> None:
        self.output, self.request = output, request
        self.tokens = list(output.new_token_ids)
        self.logprobs = [] if output.new_logprobs is None else [output.new_logprobs]

    def fits(self, output: EngineCoreOutput) -> bool:
        """Whether log-probabilities can be joined: their columns are those of the whole batch."""
        more = output.new_logprobs
        if more is None:
            return not (self.logprobs and output.new_token_ids)
        return bool(self.logprobs) and self.logprobs[-1][1].shape[1:] == more[1].shape[1:]

    def add(self, output: EngineCoreOutput) -> None:
        """Hold one more, which fits."""
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)

    def whole(self) -> EngineCoreOutput:
        """All as one output."""
        self.output.new_token_ids = self.tokens
        self.output.new_logprobs = _joined(self.logprobs)
        return self.output


class HeldOutputs:
    """Stands before the queue of what an engine tells its clients.

    Args:
        queue: gets what is told: pairs of a client's number, and its outputs.
        requests: those that the engine has, by id.
    """

    def __init__(self, queue: Any, requests: dict[str, Any]) -> None:
        self._queue = queue
        self._requests = requests
        self._held: dict[int, dict[str, _Entry]] = {}
        """By client and request."""
        self._steps: dict[int, int] = {}
        self._version: str | None = None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put_nowait(self, item: tuple[int, EngineCoreOutputs] | bytes) -> None:
        """Tell a client something, or keep it for later."""
        with self._lock:
            if isinstance(item, bytes):  # the engine is dead: its last word is told in any case
                try:
                    self._tell_all()
                finally:
                    self._queue.put_nowait(item)
                return
            client, outputs = item
            self._note_version(outputs)
            if outputs.utility_output is not None:
                self._tell_all()
            if outputs.outputs:
                outputs.outputs = [
                    told for output in outputs.outputs for told in self._told(client, output)
                ]
                self._steps[client] = self._steps.get(client, 0) + 1
                if self._steps[client] == STEPS:
                    self._steps[client] = 0
                    outputs.outputs += self._take(client)
            if outputs.outputs or not _same(_more_than_outputs(outputs), _NOTHING):
                self._queue.put_nowait((client, outputs))

    def _note_version(self, outputs: EngineCoreOutputs) -> None:
        """Tell what is held of another version. Ends by a pause bring none: theirs is the last."""
        version = getattr(outputs, "weight_version", None)
        if version != self._version and outputs.outputs:
            self._tell_all()
        if version is not None:
            self._version = version

    def _told(self, client: int, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        """What is told now that a request has this output, together with what was held before."""
        held = self._held.setdefault(client, {})
        name = output.request_id
        entry, request = held.pop(name, None), self._requests.get(name)
        if entry is not None and request is not None and entry.request is not request:
            entry = None  # that request was given up, and another has its id
        is_plain = _same(_more_than_tokens(output), _NO_MORE)
        if entry is None:
            if not is_plain or not _ends_whole(request):
                return [output]
            held[name] = _Entry(output, request)
            return []
        if not entry.fits(output):
            if not is_plain:
                return [entry.whole(), output]
            held[name] = _Entry(output, request)
            return [entry.whole()]
        entry.add(output)
        if is_plain:
            held[name] = entry
            return []
        output.new_token_ids, output.new_logprobs = entry.tokens, _joined(entry.logprobs)
        return [output]

    def _take(self, client: int) -> list[EngineCoreOutput]:
        """What is held for a client, no longer held."""
        return [entry.whole() for entry in self._held.pop(client, {}).values()]

    def _tell_all(self) -> None:
        for client in list(self._held):
            if taken := self._take(client):
                outputs = EngineCoreOutputs(outputs=taken)
                if self._version is not None:
                    outputs.weight_version = self._version
                self._queue.put_nowait((client, outputs))


def _ends_whole(request: Any) -> bool:
    """Whether a request's client looks at nothing before its end."""
    params = None if request is None else request.sampling_params
    if params is None or params.stop:  # the client looks for strings to stop at
        return False
    return params.output_kind == RequestOutputKind.FINAL_ONLY


def _same(values: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(map(operator.is_, values, others))


def _joined(parts: list[Any]) -> Any:
    """Log-probabilities of successive tokens as one; None of none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    ids, logprobs, ranks = (
        np.concatenate([part[index] for part in parts]) for index in range(len(parts[0]) - 1)
    )
    return type(parts[0])(ids, logprobs, ranks, None)
