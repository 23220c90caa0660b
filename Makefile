# `make finetune` and `make test` need Python >= 3.10 with pip, and make: the rest they set up in $(VENV).

PYTHON ?= python3
# Installed before everything else, so that another build can be chosen:
# make test TORCH="torch==2.12.0 --index-url URL"
TORCH ?= torch==2.13.0

# What `make test-older` is about: the oldest release that pyproject.toml allows, or another one.
OLDER ?= transformers==5.0.0
# The tests that a release of transformers can touch.
OLDER_TESTS := $(addprefix tests/,contract models shardformer verify pipeline plugins cli)

VENV := .venv
BIN := $(VENV)/bin
OLDER_VENV := .venv-older
# Written once everything is installed, and says with what.
READY := $(VENV)/.installed
OLDER_READY := $(OLDER_VENV)/.installed
SETTINGS := $(PYTHON) $(TORCH)
OLDER_SETTINGS := $(SETTINGS) $(OLDER)

# Several pytest processes, each with workers of its own: a distributed test waits more than it computes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal

FINETUNE := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 4 \
	examples/language/bert/finetune.py --plugin hybrid_parallel --model_type bert

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help finetune test test-all test-older lint format install clean always

help:
	@echo "make finetune   fine-tune BERT on 4 processes: tensor and pipeline parallelism, then ZeRO"
	@echo "make test       lint, type check and the quick tests"
	@echo "make test-all   the same with every test"
	@echo "make test-older the quick tests with $(OLDER), in $(OLDER_VENV)"
	@echo "make lint       lint and type check"
	@echo "make format     rewrite the sources in the house format"
	@echo "make install    only set up $(VENV)"
	@echo "make clean      remove $(VENV), $(OLDER_VENV) and everything else that was made here"

finetune: $(READY)
	$(FINETUNE) --target_f1 0.86
	$(FINETUNE) --tp_size 2 --pp_size 1 --zero_stage 1 --epochs 1

test: lint
	$(PYTEST) -q -m "not slow"

test-all: lint
	KEEP_MATRIX=verify/matrix.json $(BIN)/pytest -q
	$(BIN)/echelon models --markdown > docs/models.md

test-older: $(OLDER_READY)
	$(OLDER_VENV)/bin/pytest -q -m "not slow" $(OLDER_TESTS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(READY)

# $(call differs,FILE,SETTINGS): whether an environment was installed with other settings, or none is.
differs = $(filter-out 0,$(shell echo "$(2)" | cmp -s - $(1); echo $$?))
ifneq ($(call differs,$(READY),$(SETTINGS)),)
$(READY): always
$(READY): CLEAR := $(if $(wildcard $(READY)),--clear)
endif
ifneq ($(call differs,$(OLDER_READY),$(OLDER_SETTINGS)),)
$(OLDER_READY): always
$(OLDER_READY): CLEAR := $(if $(wildcard $(OLDER_READY)),--clear)
endif
$(OLDER_READY): SETTINGS := $(OLDER_SETTINGS)
$(OLDER_READY): RELEASE := $(OLDER)

$(READY) $(OLDER_READY): setup.py pyproject.toml
	@# Without ensurepip (Debian keeps it in a package of its own) pip is put in from outside.
	$(PYTHON) -m venv $(CLEAR) $(@D) || { $(PYTHON) -m venv --without-pip $(@D) && $(PYTHON) -m pip install \
		--target "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" pip; }
	$(@D)/bin/python -m pip install --upgrade pip
	$(@D)/bin/python -m pip install $(TORCH)
	$(@D)/bin/python -m pip install -e ".[test]" $(RELEASE)
	echo "$(SETTINGS)" > $@

clean:
	rm -rf $(VENV) $(OLDER_VENV) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
