# Two commands: `make demo` and `make test`. Everything lives in .venv, data_cache and runs.
PYTHON ?= python3
VENV ?= .venv
# Package index for torch alone, for machines without a GPU that should not take the CUDA build.
TORCH_INDEX ?=

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed

.PHONY: install demo test test-slow test-gpu check clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(RUN) -m training.demo

test: $(READY) check
	$(RUN) -m pytest

test-slow: $(READY)
	$(RUN) -m pytest -m slow

test-gpu: $(READY)
	$(RUN) -m pytest -m gpu

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) data_cache runs
