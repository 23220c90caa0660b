# `make finetune` and `make test` need Python >= 3.11 with pip, and make: the rest they set up in $(VENV).

PYTHON ?= python3
# Installed before everything else, so that another build can be chosen:
# make test TORCH="torch==2.12.0 --index-url URL"
TORCH ?= $(shell sed -n '/^torch==/p' constraints.txt)

# `make test-older` tries the oldest releases that pyproject.toml allows: of transformers, and of torch beside a later
# transformers. One environment for each.
OLDER ?= transformers==5.0.0
OLDEST_TORCH ?= torch==2.11.0
BESIDE_IT ?= transformers==5.17.0
# `make test-newest` takes the newest that pip finds.
NEWEST ?= --upgrade transformers peft
# The tests that a release can touch.
OLDER_TESTS := $(addprefix tests/,refusals contract models shardformer verify pipeline plugins cli)

VENV := .venv
BIN := $(VENV)/bin
OLDER_VENV := .venv-older-$(subst ==,-,$(OLDER))
NEWEST_VENV := .venv-newest
# Written once everything is installed, and says with what.
READY := $(VENV)/.installed
OLDER_READY := $(OLDER_VENV)/.installed
NEWEST_READY := $(NEWEST_VENV)/.installed
# The releases of constraints.txt, except for torch, of which another build may be chosen.
PINNED := build/constraints.txt
SETTINGS := $(PYTHON) $(TORCH)
OLDER_SETTINGS := $(SETTINGS) $(OLDER)

# Several pytest processes, each with workers of its own: a distributed test waits more than it computes. A run writes its
# counts and releases into build/releases, from which `make releases` makes docs/releases.md. Tests and the interpreters
# that they start read their bytecode from files, whatever the environment says.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 RELEASES=build/releases $(BIN)/pytest -n 3 --dist worksteal
# Where `make test-newest` collects warnings of other packages.
FOREIGN := build/warnings

# The part of `make test-all`, of how many: one of eight takes at most 40 minutes on 2 cores. Of `make gpu`: names.
PART ?= 1/1
# Where `make gpu` keeps its results, with which the next one goes on.
RESULTS ?= build/gpu
# The packages, and a folder of links to them under the names that they are installed with. For tools that look a
# package up by its name and follow no editable install, and for processes that import this checkout uninstalled.
PACKAGES := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
LINKS := build/links

FINETUNE := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 4 \
	examples/language/bert/finetune.py --plugin hybrid_parallel --model_type bert

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help coverage docs finetune gpu releases test test-all test-newest test-older test-one-older lint format links install clean always

help:
	@echo "make finetune   fine-tune BERT on 4 processes: tensor and pipeline parallelism, then ZeRO"
	@echo "make gpu        what only a GPU proves, and how fast it is: with the $(PYTHON) that is there; PART=alone for one part"
	@echo "make test       lint, type check and the quick tests"
	@echo "make test-all   the same with every test; PART=3/8 for the third of eight parts, each with its results"
	@echo "make test-older quick tests with $(OLDER), then with $(OLDEST_TORCH) and $(BESIDE_IT)"
	@echo "make test-newest quick tests with the newest torch, transformers and peft that pip finds"
	@echo "make releases   add the last runs to the table of releases, docs/releases.md"
	@echo "make coverage   which model types train, and what of Echelon agrees with one process (echelon models --all); PART=3/16 for a part, goes on where it was ended"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make lint       lint and type check"
	@echo "make format     rewrite the sources in the house format"
	@echo "make links      only make $(LINKS): with it on PYTHONPATH, this checkout is imported without being installed"
	@echo "make install    only set up $(VENV)"
	@echo "make clean      remove $(VENV), those of older releases and everything else that was made here"

finetune: $(READY)
	$(FINETUNE) --target_f1 0.86
	$(FINETUNE) --tp_size 2 --pp_size 1 --zero_stage 1 --epochs 1

gpu: links
	PYTHONPATH="$(CURDIR)/$(LINKS)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m tests.gpu $(filter-out 1/1,$(PART)) --results $(RESULTS)

test: lint
	$(PYTEST) -q -m "not slow"

test-all: lint
	KEEP_RESULTS=tests/results PART=$(PART) $(PYTEST) -q
	$(BIN)/python -m tests.matrix

test-older: test-one-older
	$(MAKE) test-one-older TORCH="$(OLDEST_TORCH)" OLDER="$(BESIDE_IT)"

test-one-older: $(OLDER_READY)
	$(subst $(BIN),$(OLDER_VENV)/bin,$(PYTEST)) -q -m "not slow" $(OLDER_TESTS)

# One test fails for all warnings of other packages; Echelon's own are errors.
test-newest: $(NEWEST_READY)
	rm -rf $(FOREIGN)
	mkdir -p $(FOREIGN)
	FOREIGN_WARNINGS=$(FOREIGN) $(subst $(BIN),$(NEWEST_VENV)/bin,$(PYTEST)) -q -m "not slow"; status=$$?; \
	FOREIGN_WARNINGS=$(FOREIGN) $(NEWEST_VENV)/bin/pytest -q tests/foreign_warnings.py && exit $$status

releases: $(READY)
	$(BIN)/python -m tests.releases

coverage: $(READY)
	for record in plain stages splits $(foreach layouts,two five sequences heads,"parity --layouts $(layouts)"); do \
		OMP_NUM_THREADS=1 $(BIN)/python -m tests.coverage.$$record --part $(PART) || exit; \
	done

# The banner is about the release of MkDocs after the one that is used here.
docs: $(READY) links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

lint: $(READY) links
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

links:
	rm -rf $(LINKS)
	mkdir -p $(LINKS)/echelon
	ln -s $(addprefix ../../../,$(PACKAGES) __init__.py __main__.py py.typed) $(LINKS)/echelon

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
$(NEWEST_READY): always
$(NEWEST_READY): TORCH := --upgrade torch
$(NEWEST_READY): RELEASE := $(NEWEST)
$(READY): $(PINNED)
$(READY): CONSTRAINED := --constraint $(PINNED)
$(READY): export PIP_BUILD_CONSTRAINT := $(PINNED)

$(PINNED): constraints.txt
	mkdir -p $(@D)
	sed '/^torch==/d' $< > $@

$(READY) $(OLDER_READY) $(NEWEST_READY): pyproject.toml
	@# Without ensurepip (Debian keeps it in a package of its own) pip is put in from outside.
	$(PYTHON) -m venv $(CLEAR) $(@D) || { $(PYTHON) -m venv --without-pip $(@D) && $(PYTHON) -m pip install \
		--target "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" pip; }
	$(@D)/bin/python -m pip install --upgrade pip $(CONSTRAINED)
	$(@D)/bin/python -m pip install $(TORCH) $(CONSTRAINED)
	$(@D)/bin/python -m pip install -e ".[test]" $(RELEASE) $(CONSTRAINED)
	echo "$(SETTINGS)" > $@

clean:
	rm -rf $(VENV) .venv-older-* $(NEWEST_VENV) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
