"""Builds the engine of a run, whatever its kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config import Config
from agentrl.engines.base import Engine
from agentrl.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["make_engine"]


def make_engine(
    config: Config,
    *,
    run_dir: Path,
    model_folder: Path | None = None,
    module: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Engine:
    """The engine that `engine.kind` names, not started.

    Args:
        config: The whole run.
        run_dir: Where servers log and weights on disk go.
        model_folder: For servers: a Hugging Face folder with the policy before training. Without
            it, `model.path` must be one.
        module: For `transformers`: the engine's own module.
        tokenizer: For `scripted`: what the script's lines are encoded with.

    Raises:
        UsageError: what the kind needs is missing.
    """
    kind = config.engine.kind
    if kind in ("vllm", "sglang"):
        from agentrl.engines.servers import make_server_engine

        folder = model_folder or Path(config.model.path)
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"engine.kind {kind} serves a model folder, and {folder} is none: save the model "
                "as a Hugging Face folder and name it with --model.path"
            )
        return make_server_engine(config, model_folder=folder, run_dir=run_dir)
    if kind == "transformers":
        from agentrl.engines.transformers import TransformersEngine

        if module is None:
            raise ValueError("kind transformers needs a module")
        return TransformersEngine(
            module,
            max_num_seqs=config.engine.max_num_seqs,
            max_model_len=config.engine.max_model_len or config.rollout.max_tokens,
            deterministic=config.engine.deterministic,
            record_routing=config.rollout.router_replay,
        )
    from agentrl.engines.scripted import ScriptedEngine

    if config.engine.script is None or tokenizer is None:
        raise ValueError("kind scripted needs engine.script and a tokenizer")
    return ScriptedEngine.from_file(config.engine.script, tokenizer)
