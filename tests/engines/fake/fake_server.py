"""A server that answers as vLLM and SGLang do, with a real model behind it.

The shapes of requests and answers are those recorded from vLLM 0.32 and SGLang 0.5.23; tokens come
from plain forward passes, so that what is tested against the real servers can be tested here. The
packages `vllm` and `sglang` beside this file start it by the same command lines; the folder goes
on the server's PYTHONPATH.

Some routes are for tests alone: POST /fake/fail makes the next request of a path fail, or be
answered with something else, POST /fake/metrics says what GET /metrics answers, GET /fake/requests
lists every path that was asked for, and GET /fake/generated what each request for tokens said of
itself.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.engines.transport.base import GroupAddress
from agentrl.engines.transport.group import new_group
from agentrl.models.routing import Routers

PAGE = 16
"""Tokens of one page of the prefix cache."""


@dataclass
class Running:
    """A request that the server is working on."""

    aborted: bool = False


class Sampler:
    """The model, the prefix cache, pause and version of one server."""

    def __init__(self, model_folder: Path, token_seconds: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_folder)
        self.base = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.adapters: set[str] = set()
        self.token_seconds = token_seconds
        self.version = "default"
        self.cache: set[tuple[str, ...]] = set()
        self.running: dict[str, Running] = {}
        self.resumed = threading.Event()
        self.resumed.set()
        self.lock = threading.Lock()
        self.groups: dict[str, Any] = {}
        self.fail_next: dict[str, Any] = {}
        """Paths whose next request is answered with this, or with an error where it is None."""
        self.always_fail = ""
        """Why no request for tokens succeeds, if so."""
        self.old = False
        """Whether it knows nothing of versions, like the servers of a few releases ago."""
        self.prefill_seconds = 0.0
        """What a prompt takes that is not cached."""
        self.cannot_freeze = False
        """Whether it fails to keep its heap from the garbage collector."""
        self.requests: list[str] = []
        """Every path that was asked for."""
        self.received = 0
        """Buckets that were broadcast."""
        self.generated: list[dict[str, Any]] = []
        """Body and headers of every request for tokens."""
        self.metrics = ""
        self.routers: Routers | None = None
        """Set where it tells the experts of tokens."""

    def generate(
        self,
        request_id: str,
        prompt: list[int],
        *,
        limit: int,
        temperature: float,
        stop: set[int],
        salt: str,
        seed: int | None,
    ) -> dict[str, Any]:
        if self.always_fail:
            raise RuntimeError(self.always_fail)
        state = self.running[request_id] = Running()
        generator = torch.Generator().manual_seed(seed if seed is not None else time.time_ns())
        cached = self._cached(prompt, salt)
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[str] = []
        reason = "length"
        computed = time.monotonic() + (cached + PAGE < len(prompt)) * self.prefill_seconds
        while time.monotonic() < computed and not state.aborted:
            time.sleep(0.005)
            self.resumed.wait()
        if limit == 0 and state.aborted:
            reason = "abort"
        while len(ids) < limit:
            self.resumed.wait()
            if state.aborted:
                reason = "abort"
                break
            with self.lock, torch.no_grad():
                logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
                scaled = torch.log_softmax(logits / (temperature or 1.0), -1)
                if temperature == 0:
                    token = int(scaled.argmax())
                else:
                    token = int(torch.multinomial(scaled.exp(), 1, generator=generator))
                ids.append(token)
                logprobs.append(float(scaled[token]))
                versions.append(self.version)
            time.sleep(self.token_seconds)
            if token in stop:
                reason = "stop"
                break
        del self.running[request_id]
        if limit or not state.aborted:
            self._keep(prompt + ids, salt)
        spans = [
            {"version": version, "start": i, "end": i + 1} for i, version in enumerate(versions)
        ]
        routes = None
        if self.routers is not None:
            self.model(torch.tensor([(prompt + ids)[:-1]]))
            routes = self.routers.taken().numpy()
        return {
            "routes": routes,
            "ids": ids,
            "logprobs": logprobs,
            "spans": spans,
            "reason": reason,
            "cached": cached,
        }

    def abort(self, request_ids: list[str] | None = None) -> None:
        for request_id, state in list(self.running.items()):
            if request_ids is None or request_id in request_ids:
                state.aborted = True

    def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort()
            while self.running:
                time.sleep(0.005)
        self.resumed.clear()
        with self.lock:
            pass  # the token that is being sampled is finished

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        with self.lock, torch.no_grad():
            for name, tensor in tensors.items():
                self.model.get_parameter(name).copy_(tensor)

    def load_folder(self, folder: str) -> None:
        for file in Path(folder).glob("*.safetensors"):
            self.load(load_file(file))

    def load_adapter(self, folder: str) -> None:
        """Put a LoRA adapter beside the weights that the server started with."""
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        factors = load_file(Path(folder) / "adapter_model.safetensors")
        changed = {}
        for name, factor_b in factors.items():
            if ".lora_B." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
                change = factor_b @ factors[name.replace(".lora_B.", ".lora_A.")]
                scale = config["lora_alpha"] / config["r"]
                changed[f"{module}.weight"] = self.base[f"{module}.weight"] + scale * change
        self.load(changed)

    def receive(self, buckets: list[list[tuple[str, str, list[int]]]], group: str) -> None:
        for specs in buckets:
            dtypes = [getattr(torch, dtype) for _, dtype, _ in specs]
            shapes = [torch.Size(shape) for _, _, shape in specs]
            sizes = [s.numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            torch.distributed.broadcast(flat, src=0, group=self.groups[group])
            self.received += 1
            names = [name for name, _, _ in specs]
            parts = zip(names, flat.split(sizes), dtypes, shapes, strict=True)
            self.load({name: part.view(dtype).view(shape) for name, part, dtype, shape in parts})

    def _cached(self, prompt: list[int], salt: str) -> int:
        pages = 0
        while (pages + 1) * PAGE < len(prompt):
            if (salt, *map(str, prompt[: (pages + 1) * PAGE])) not in self.cache:
                break
            pages += 1
        return pages * PAGE

    def _keep(self, ids: list[int], salt: str) -> None:
        for end in range(PAGE, len(ids), PAGE):
            self.cache.add((salt, *map(str, ids[:end])))


@dataclass
class Refusal(Exception):
    """An answer with an error status."""

    status: int
    message: str = ""


@dataclass
class Call:
    """One request: parsed body, query and headers."""

    body: dict[str, Any]
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


def vllm_answer(sampler: Sampler, path: str, call: Call) -> Any:
    """vLLM's routes."""
    body, query = call.body, call.query
    if path == "/inference/v1/generate":
        params = body["sampling_params"]
        if body.get("model", "") not in {"", *sampler.adapters}:
            raise Refusal(404, f"The model {body['model']} does not exist.")
        result = sampler.generate(
            "generate-tokens-" + body["request_id"],
            body["token_ids"],
            limit=params["max_tokens"],
            temperature=params["temperature"],
            stop=set(params["stop_token_ids"]),
            # Each data-parallel replica has a cache of its own.
            salt=f"{body.get('cache_salt')} {call.headers.get('X-data-parallel-rank', 0)}",
            seed=params.get("seed"),
        )
        pairs = zip(result["ids"], result["logprobs"], strict=True)
        content = [{"token_id": i, "logprob": p, "rank": None} for i, p in pairs]
        choice = {
            "index": 0,
            "finish_reason": result["reason"],
            "token_ids": result["ids"],
            "weight_versions": result["spans"],
            "logprobs": {"content": content} if "logprobs" in params else None,
        }
        if sampler.old:
            del choice["weight_versions"]
        if result["routes"] is not None:
            np.save(file := io.BytesIO(), result["routes"].astype(np.uint8))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        details = {"cached_tokens": result["cached"]}
        return {"choices": [choice], "usage": {"prompt_tokens_details": details}}
    if path == "/pause":
        return sampler.pause(query["mode"])
    if path == "/resume":
        return sampler.resumed.set()
    if path == "/reset_prefix_cache":
        sampler.cache.clear()
        return {"success": True}
    if path == "/abort_requests":
        return sampler.abort(body["request_ids"])
    if path == "/update_weight_version" and not sampler.old:
        sampler.version = body["new_version"]
        return {"success": True}
    if path == "/v1/load_lora_adapter":
        if body["lora_name"] in sampler.adapters:
            raise Refusal(400, "has already been loaded")
        if not (Path(body["lora_path"]) / "adapter_config.json").exists():
            raise Refusal(404, "no adapter found")
        sampler.load_adapter(body["lora_path"])
        return sampler.adapters.add(body["lora_name"])
    if path == "/v1/unload_lora_adapter":
        if body["lora_name"] not in sampler.adapters:
            raise Refusal(404, "cannot be found")
        return sampler.adapters.remove(body["lora_name"])
    if path == "/collective_rpc":
        if body["method"] == "reload_weights":
            return sampler.load_folder(body["kwargs"]["weights_path"])
        info = body["kwargs"]["update_info"]
        return sampler.receive(info["buckets"], info["group"])
    if path == "/init_weight_transfer_engine":
        info = body["init_info"]
        if not info.get("leave"):
            fields = ("name", "backend", "host", "port", "world_size", "timeout")
            address = GroupAddress(**{key: info[key] for key in fields})
            sampler.groups[info["name"]] = new_group(address, info["rank_offset"])
        else:
            torch.distributed.destroy_process_group(sampler.groups.pop(info["name"]))
        return {}
    if path == "/update_weights":
        if body["update_info"].get("abandon"):
            raise Refusal(500, "the update is abandoned")
        return sampler.receive(body["update_info"]["buckets"], body["update_info"]["group"])
    if path in ("/start_weight_update", "/finish_weight_update", "/sleep", "/wake_up"):
        return {}
    raise Refusal(404)


def sglang_answer(sampler: Sampler, path: str, call: Call) -> Any:
    """SGLang's routes."""
    body = call.body
    if path == "/generate":
        params = body["sampling_params"]
        result = sampler.generate(
            body["rid"],
            body["input_ids"],
            limit=params["max_new_tokens"],
            temperature=params.get("temperature", 1.0),
            stop=set(params.get("stop_token_ids", ())),
            salt=f"{body.get('extra_key')} {body.get('routed_dp_rank', 0)}",
            seed=params.get("sampling_seed"),
        )
        meta = {
            "finish_reason": {"type": result["reason"]},
            "weight_versions": result["spans"],
            "cached_tokens": result["cached"],
        }
        if sampler.old:
            del meta["weight_versions"]
        if result["routes"] is not None and body.get("return_routed_experts"):
            numbers = result["routes"].astype(np.int32).tobytes()
            meta["routed_experts"] = base64.b64encode(numbers).decode()
        if body.get("return_logprob"):
            pairs = zip(result["logprobs"], result["ids"], strict=True)
            meta["output_token_logprobs"] = [[p, i, None] for p, i in pairs]
        return {"output_ids": result["ids"], "meta_info": meta}
    if path == "/pause_generation":
        return sampler.pause(body["mode"])
    if path == "/continue_generation":
        return sampler.resumed.set()
    if path == "/freeze_gc" and sampler.cannot_freeze:
        raise Refusal(500, "no memory")
    if path == "/freeze_gc" and not sampler.old:
        return print("Freezing GC in Scheduler process.", flush=True)
    if path == "/flush_cache":
        return sampler.cache.clear()
    if path == "/abort_request":
        return sampler.abort(None if body.get("abort_all") else [body["rid"]])
    if path == "/update_weight_version" and not sampler.old:
        sampler.version = body["new_version"]
        return {"success": True}
    if path == "/update_weights_from_disk":
        return sampler.load_folder(body["model_path"])
    if path == "/init_weights_update_group":
        address = GroupAddress(
            name=body["group_name"],
            backend=body["backend"],
            host=body["master_address"],
            port=body["master_port"],
            world_size=body["world_size"],
            timeout=60.0,
        )
        sampler.groups[body["group_name"]] = new_group(address, body["rank_offset"])
        return {}
    if path == "/destroy_weights_update_group":
        torch.distributed.destroy_process_group(sampler.groups.pop(body["group_name"]))
        return {}
    if path == "/update_weights_from_distributed":
        specs = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
        return sampler.receive([specs], body["group_name"])
    if path in (
        "/begin_weight_update",
        "/end_weight_update",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    ):
        return {}
    raise Refusal(404)


def _handler(sampler: Sampler, answer: Any) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # as servers do: head and body of an answer are two writes

        def do_GET(self) -> None:
            answers = {
                "/fake/requests": sampler.requests,
                "/fake/generated": sampler.generated,
                "/fake/received": sampler.received,
            }
            if self.path == "/metrics":
                self._send_text(200, sampler.metrics, "text/plain; version=0.0.4")
            else:
                self._send(200, answers.get(self.path, {}))

        def do_POST(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            if parts.path == "/fake/fail":
                sampler.fail_next[body["path"]] = body.get("answer")
                self._send(200, {})
                return
            if parts.path == "/fake/metrics":
                sampler.metrics = body["text"]
                self._send(200, {})
                return
            if parts.path.endswith("/generate"):
                sampler.generated.append({"body": body, "headers": dict(self.headers)})
            sampler.requests.append(parts.path)
            try:
                if parts.path not in sampler.fail_next:
                    call = Call(body, query, dict(self.headers))
                    self._send(200, answer(sampler, parts.path, call))
                elif (instead := sampler.fail_next.pop(parts.path)) is not None:
                    self._send(200, instead)
                else:
                    raise Refusal(500, "told to fail")
            except Refusal as refusal:
                self._send(refusal.status, {"error": refusal.message})
            except (RuntimeError, KeyError) as error:
                self._send(500, {"error": repr(error)})

        def _send(self, status: int, payload: Any) -> None:
            self._send_text(status, json.dumps(payload), "application/json")

        def _send_text(self, status: int, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

    return Handler


class Server(ThreadingHTTPServer):
    """A thread for each connection, and room for many that come at once."""

    daemon_threads = True
    request_queue_size = 512


def main(kind: str) -> None:
    """Parse the few options that matter and serve for ever."""
    parser = argparse.ArgumentParser()
    parser.add_argument("serve", nargs="*")
    parser.add_argument("--model-path")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--exit-at-start", action="store_true")
    parser.add_argument("--cannot-sample", action="store_true")
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--prefill-seconds", type=float, default=0.0)
    parser.add_argument("--cannot-freeze", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    options, _ = parser.parse_known_args()
    if options.exit_at_start:
        raise SystemExit("the fake server was told to end")
    torch.set_num_threads(1)
    folder = options.model_path or options.serve[1]
    sampler = Sampler(Path(folder), options.token_seconds)
    sampler.old = options.old
    sampler.cannot_freeze = options.cannot_freeze
    sampler.prefill_seconds = options.prefill_seconds
    if options.enable_return_routed_experts:
        sampler.routers = Routers(sampler.model)
    if options.cannot_sample:
        sampler.always_fail = "no kernel for this model"
    handler = _handler(sampler, vllm_answer if kind == "vllm" else sglang_answer)
    Server((options.host, options.port), handler).serve_forever()
