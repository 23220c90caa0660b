# `make finetune` and `make test` need Python >= 3.10 with pip, and make: the rest they set up in $(VENV).

PYTHON ?= python3
# Installed before everything else, so that another build can be chosen:
# make test TORCH="torch==2.12.0 --index-url URL"
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
# Written once everything is installed, and says with what.
READY := $(VENV)/.installed
SETTINGS := $(PYTHON) $(TORCH)

FINETUNE := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 4 \
	examples/language/bert/finetune.py --plugin hybrid_parallel --model_type bert

# The folders that are packages of echelon; tests/test_project.py compares them with setup.py.
FOLDERS := $(filter-out echelon tests examples benchmarks,$(patsubst %/__init__.py,%,$(wildcard */__init__.py)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help finetune test test-all lint format links install clean always

help:
	@echo "make finetune   fine-tune BERT on 4 processes: tensor and pipeline parallelism, then ZeRO"
	@echo "make test       lint, type check and the quick tests"
	@echo "make test-all   the same with every test"
	@echo "make lint       lint and type check"
	@echo "make format     rewrite the sources in the house format"
	@echo "make install    only set up $(VENV)"
	@echo "make clean      remove $(VENV) and everything else that was made here"

finetune: $(READY)
	$(FINETUNE) --target_f1 0.86
	$(FINETUNE) --tp_size 2 --pp_size 1 --zero_stage 1 --epochs 1

test: lint
	$(BIN)/pytest -q -m "not slow"

test-all: lint
	KEEP_MATRIX=verify/matrix.json $(BIN)/pytest -q
	$(BIN)/echelon models --markdown > docs/models.md

lint: $(READY) links
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The tree that mypy reads: echelon/ as it is once installed.
links:
	@mkdir -p .links/echelon
	@ln -sfn $(addprefix ../../,$(wildcard echelon/*.py) echelon/py.typed $(FOLDERS)) .links/echelon/

install: $(READY)

ifneq ($(shell cat $(READY) 2>/dev/null),$(SETTINGS))
$(READY): always
CLEAR := $(if $(wildcard $(READY)),--clear)
endif

$(READY): setup.py pyproject.toml
	@# Without ensurepip (Debian keeps it in a package of its own) pip is put in from outside.
	$(PYTHON) -m venv $(CLEAR) $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip install \
		--target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" pip; }
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e ".[test]"
	echo "$(SETTINGS)" > $@

clean:
	rm -rf $(VENV) .links .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
