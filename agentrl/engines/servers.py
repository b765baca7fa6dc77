"""Builds the engines of a run that are servers, out of the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from agentrl.config import Config
from agentrl.engines.base import PauseMode
from agentrl.engines.head_padding import head_padding
from agentrl.engines.launch import Launch, sglang_launch, vllm_launch
from agentrl.engines.on_cpu import has_gpu
from agentrl.engines.pool import EnginePool
from agentrl.engines.remote import RemoteEngine
from agentrl.engines.request_check import EngineLimits
from agentrl.engines.server import EngineServer
from agentrl.engines.sglang import SGLangEngine, install_loader
from agentrl.engines.sglang_router import RoutedSGLangEngine, behind_one_router
from agentrl.engines.transport.adapter import AdapterTransport
from agentrl.engines.transport.base import WeightTransport
from agentrl.engines.transport.select import make_transport, transport_name
from agentrl.engines.vllm import VLLMEngine, install_plugin
from agentrl.engines.weight_update import UpdateSettings
from agentrl.errors import UsageError

__all__ = ["make_server_engine"]


def make_server_engine(config: Config, *, model_folder: Path, run_dir: Path) -> EnginePool:
    """A pool of `engine.num_engines` servers, or of those at `engine.urls`; none is started yet.

    Args:
        config: The whole run.
        model_folder: A Hugging Face folder with the policy as it is before training.
        run_dir: Logs go to its folder `engines`, weights on disk to `weights`.

    Raises:
        UsageError: the folder holds no model, or settings do not fit together.
    """
    section = config.engine
    model = _model(config, model_folder)
    limits = EngineLimits(
        max_model_len=section.max_model_len or config.rollout.max_tokens,
        max_num_seqs=section.max_num_seqs,
        request_timeout=section.request_timeout,
        vocab_size=model.vocab_size,
        experts=_experts(config, model),
    )
    padding = None
    if section.kind == "vllm" and not section.urls and not has_gpu():
        padding = head_padding(model)
    if padding is not None:
        if config.sends_adapter:
            raise UsageError(
                "vLLM has no CPU kernels for heads as small as this model's, and adapters are not "
                "padded: set engine.lora merged"
            )
        model_folder = padding.folder(model_folder, run_dir / "engines" / "padded-model")
    update = UpdateSettings(
        pause_mode=_pause_mode(config),
        bucket_bytes=section.bucket_mb << 20,
        timeout=section.update_timeout,
    )
    transport: WeightTransport | AdapterTransport
    if config.sends_adapter:
        transport = AdapterTransport(run_dir / "weights")
    else:
        transport = make_transport(
            section, folder=run_dir / "weights", model_folder=model_folder, host=section.host
        )
    engines = [
        _engine(config, limits, update, transport, model_folder, run_dir / "engines", index)
        for index in range(len(section.urls) or section.num_engines)
    ]
    behind_one_router([e for e in engines if isinstance(e, RoutedSGLangEngine)])
    return EnginePool(
        engines, transport, update, max_restarts=section.max_restarts, padding=padding
    )


def _engine(
    config: Config,
    limits: EngineLimits,
    update: UpdateSettings,
    transport: WeightTransport | AdapterTransport,
    model_folder: Path,
    folder: Path,
    index: int,
) -> RemoteEngine:
    section = config.engine
    kind: Callable[..., RemoteEngine]
    if section.kind == "vllm":
        kind = partial(VLLMEngine, api_servers=section.api_server_count)
    else:
        kind = partial(SGLangEngine, has_loader=_has_loader(config))
        if section.router_url is not None:
            kind = partial(RoutedSGLangEngine, router_url=section.router_url.rstrip("/"))
        kind = partial(
            kind,
            api_servers=section.api_server_count,
            shared_prefill_tokens=section.shared_prefill_tokens,
        )
    server, url = None, None
    if section.urls:
        url = section.urls[index].rstrip("/")
    else:
        launch = _launch(config, limits.max_model_len, model_folder, folder, index)
        server = EngineServer(
            launch.with_port,
            name=f"{section.kind}-{index}",
            log_path=folder / f"{section.kind}-{index}.log",
            env={**launch.env, **_devices(config, index)},
            host=section.host,
            start_timeout=section.start_timeout,
        )
    return kind(
        limits=limits,
        transport=transport,
        server=server,
        url=url,
        update=update,
        api_key=section.api_key,
        replicas=section.data_parallel_size,
        num_weight_ranks=section.tensor_parallel_size * section.data_parallel_size,
        memory_device=_memory_device(config, index),
    )


def _launch(
    config: Config, max_model_len: int, model_folder: Path, folder: Path, index: int
) -> Launch:
    section, dtype, model = config.engine, config.model.dtype, str(model_folder)
    gpu = has_gpu()
    # Two servers with one seed would sample the same answers to the same prompts.
    seed = config.train.seed + index
    if section.kind == "vllm":
        plugin = install_plugin(folder / "vllm-plugin").resolve()
        lora_rank = config.model.lora.rank if config.sends_adapter else 0
        return vllm_launch(
            section,
            model,
            dtype=dtype,
            max_model_len=max_model_len,
            plugin=plugin,
            gpu=gpu,
            lora_rank=lora_rank,
            seed=seed,
            tells_experts=config.rollout.router_replay,
        )
    loader = install_loader(folder / "sglang-loader").resolve() if _has_loader(config) else None
    return sglang_launch(
        section,
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        gpu=gpu,
        loader=loader,
        seed=seed,
        tells_experts=config.rollout.router_replay,
    )


def _has_loader(config: Config) -> bool:
    """Whether SGLang servers get our loader of weights: those that start here, for `ipc`.

    Those that move experts about while they run keep to their own, as a plan would be outdated.
    """
    section = config.engine
    if section.urls or section.extra.get("enable_eplb", False):
        return False
    return transport_name(section, on_gpu=torch.cuda.is_available()) == "ipc"


def _experts(config: Config, model: PretrainedConfig) -> tuple[int, int] | None:
    """Layers, and experts of a token, that servers are to tell."""
    if not config.rollout.router_replay:
        return None
    top_k = getattr(model, "num_experts_per_tok", None)
    if top_k is None:
        raise UsageError(
            f"rollout.router_replay is set, but a model of type {model.model_type} has no experts: "
            "remove it."
        )
    return model.num_hidden_layers, top_k


def _pause_mode(config: Config) -> PauseMode:
    """`auto` lets requests go on under new weights; under a new adapter they cannot."""
    mode = config.engine.pause_mode
    if mode == "auto":
        return "abort" if config.sends_adapter else "keep"
    return mode


def _devices(config: Config, index: int) -> dict[str, str]:
    """Engine k takes the k-th share of `engine.gpus`; without them, it sees every GPU."""
    mine = _gpus(config, index)
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in mine)} if mine else {}


def _gpus(config: Config, index: int) -> tuple[int, ...]:
    section = config.engine
    share = section.tensor_parallel_size * section.data_parallel_size
    return section.gpus[index * share : (index + 1) * share]


def _memory_device(config: Config, index: int) -> torch.device | None:
    """Where weights are put for engine `index` to open them (`engine.transport` ipc).

    Raises:
        UsageError: the learner does not see the engine's GPU.
    """
    on_gpu = torch.cuda.is_available()
    mine = _gpus(config, index)
    if not mine or not on_gpu or transport_name(config.engine, on_gpu=on_gpu) != "ipc":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if str(mine[0]) not in names:
        raise UsageError(
            f"engine.transport ipc puts weights on GPU {mine[0]} of engine.gpus, which the learner "
            f"does not see (it sees {', '.join(names)}): use nccl"
        )
    return torch.device("cuda", names.index(str(mine[0])))


def _model(config: Config, model_folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(
            model_folder, trust_remote_code=config.model.trust_remote_code
        ).get_text_config()
    except (OSError, ValueError) as error:
        raise UsageError(f"{model_folder} holds no model that can be served: {error}") from error
