PYTHON ?= python3
BIN := .venv/bin

# A machine without an NVIDIA GPU gets PyTorch's CPU build where the package index offers it, the default build elsewhere.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)

.PHONY: install quickstart test lint format

install: .venv/.installed

.venv/.installed: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(if $(HAS_GPU),,$(BIN)/pip install --quiet "torch==2.13.0+cpu" || $(BIN)/pip install --quiet "torch==2.13.0")
	$(BIN)/pip install --quiet --editable ".[dev,trl]"
	touch $@

# Fine-tune a small Qwen3-MoE on the Python language reference, on 2 CPU processes with expert parallelism.
quickstart: install
	OMP_NUM_THREADS=1 $(BIN)/accelerate launch --config launch_configs/ep2_cpu.yaml -m expertmesh.finetune launch_configs/quickstart.yaml

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
