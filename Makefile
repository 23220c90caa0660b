# `make finetune` and `make test` need Python >= 3.11 with pip, and make: the rest they set up in $(VENV).

PYTHON ?= python3
# Installed before everything else, so that another build can be chosen:
# make test TORCH="torch==2.12.0 --index-url URL"
TORCH ?= torch==2.13.0

# `make test-older` tries the oldest releases that pyproject.toml allows: of transformers, and of torch beside a later
# transformers. One environment for each.
OLDER ?= transformers==5.0.0
OLDEST_TORCH ?= torch==2.11.0
BESIDE_IT ?= transformers==5.17.0
# The tests that a release can touch.
OLDER_TESTS := $(addprefix tests/,contract models shardformer verify pipeline plugins cli)

VENV := .venv
BIN := $(VENV)/bin
OLDER_VENV := .venv-older-$(subst ==,-,$(OLDER))
# Written once everything is installed, and says with what.
READY := $(VENV)/.installed
OLDER_READY := $(OLDER_VENV)/.installed
SETTINGS := $(PYTHON) $(TORCH)
OLDER_SETTINGS := $(SETTINGS) $(OLDER)

# Several pytest processes, each with workers of its own: a distributed test waits more than it computes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal

# The part of `make test-all`, of how many: one of eight takes at most 40 minutes on 2 cores. Of `make gpu`: names.
PART ?= 1/1
# Where `make gpu` keeps its results, with which the next one goes on.
RESULTS ?= build/gpu

FINETUNE := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 4 \
	examples/language/bert/finetune.py --plugin hybrid_parallel --model_type bert

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help finetune gpu test test-all test-older test-one-older lint format install clean always

help:
	@echo "make finetune   fine-tune BERT on 4 processes: tensor and pipeline parallelism, then ZeRO"
	@echo "make gpu        what only a GPU proves, and how fast it is: with the $(PYTHON) that is there; PART=alone for one part"
	@echo "make test       lint, type check and the quick tests"
	@echo "make test-all   the same with every test; PART=3/8 for the third of eight parts, each with its results"
	@echo "make test-older quick tests with $(OLDER), then with $(OLDEST_TORCH) and $(BESIDE_IT)"
	@echo "make lint       lint and type check"
	@echo "make format     rewrite the sources in the house format"
	@echo "make install    only set up $(VENV)"
	@echo "make clean      remove $(VENV), those of older releases and everything else that was made here"

finetune: $(READY)
	$(FINETUNE) --target_f1 0.86
	$(FINETUNE) --tp_size 2 --pp_size 1 --zero_stage 1 --epochs 1

gpu:
	$(PYTHON) -m tests.gpu $(filter-out 1/1,$(PART)) --results $(RESULTS)

test: lint
	$(PYTEST) -q -m "not slow"

test-all: lint
	KEEP_RESULTS=tests/results PART=$(PART) $(PYTEST) -q
	$(BIN)/python -m tests.matrix

test-older: test-one-older
	$(MAKE) test-one-older TORCH="$(OLDEST_TORCH)" OLDER="$(BESIDE_IT)"

test-one-older: $(OLDER_READY)
	$(subst $(BIN),$(OLDER_VENV)/bin,$(PYTEST)) -q -m "not slow" $(OLDER_TESTS)

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
	rm -rf $(VENV) .venv-older-* .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
