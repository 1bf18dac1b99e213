# Two commands: `make demo` and `make test`. Everything they write lies in .venv, data_cache and runs.
# `make study METHOD=thoughtbubbles` writes a report to docs/results too.
PYTHON ?= python3
VENV ?= .venv
# Package index for torch alone: a machine without a GPU need not take the CUDA build (see README).
TORCH_INDEX ?=

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
RUN := $(VENV)/bin/python
# Compiles installed packages, without their tests, on all cores: pip would use one, for most of the installation's time.
COMPILE := $(RUN) -m compileall -qq --workers 0 -x 'site-packages/.*/tests/' $(VENV)/lib
READY := $(VENV)/.installed
DEMO := runs/demo
STEPS := 300

.PHONY: install demo demo-full study suite tune test test-slow test-gpu test-scatter bench-gpu check docs clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), once: PyTorch and the rest take some minutes."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) \
		--constraint constraints.txt torch
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(COMPILE) || true  # some packages hold files for newer versions of Python
	touch $@

# Trains once; a second `make demo` compares what is there. An interrupted run goes on from its last
# checkpoint. `rm -r runs/demo` starts again.
$(DEMO)/%/trained: | $(READY) configs/%/tiny.yaml
	@echo "Training $* for $(STEPS) steps. PyTorch takes some seconds to load."
	$(RUN) train.py fit -c configs/$*/tiny.yaml --trainer.default_root_dir $(DEMO)/$* \
		--trainer.max_steps $(STEPS) --trainer.val_check_interval 100 \
		--checkpoint.every_n_train_steps 50 $(ANALYSIS) $(if $(wildcard $(DEMO)/$*/*/*/checkpoints/last.ckpt),--ckpt_path last)
	touch $@

.PRECIOUS: $(DEMO)/%/trained
$(DEMO)/thoughtbubbles/trained: ANALYSIS = --trainer.callbacks+ callbacks.ForkAnalysis --trainer.callbacks.every_n_validations 3
# Thoughtbubbles next to its control, on the same data in the same order.
demo: $(DEMO)/transformer/trained $(DEMO)/thoughtbubbles/trained
	@echo "Comparing the two on the documents held out for validation."
	$(RUN) evaluate.py compare $(^D) --output $(DEMO)/comparison
	$(RUN) evaluate.py think --ckpt $(^D) --text "A list is a mutable sequence, and so is a dict." \
		--output $(DEMO)/thoughts.html
	@sed 's|runs/demo|$(DEMO)|g' docs/next-steps.txt
	@printf '  %-22s%s\n' 'open the report' $(DEMO)/comparison/report.html
	@printf '  %-22s%s\n' 'see them think' $(DEMO)/thoughts.html
	@ls -t $(DEMO)/thoughtbubbles/*/*/fork_analysis/*-tokens.png 2>/dev/null | head -1 \
		| sed 's/^/  see where it forked   /'

demo-full:
	$(MAKE) demo DEMO=runs/demo-full STEPS=600

# Evidence for a method: several runs, an hour at most; a stopped study resumes. TEXT: globs of your own
# text, TEXT_NAME: its name in the report, JOBS: runs at a time, OPERATIONS: N of thinking_states; ARGS: further
# options, such as ARGS='--only vanilla --seeds 0'.
STUDY = $(RUN) -m $(1) $(if $(TEXT),--text $(foreach pattern,$(TEXT),'$(pattern)')) $(if $(TEXT_NAME),--text_name '$(TEXT_NAME)')$(if $(JOBS), --jobs $(JOBS))$(if $(OPERATIONS), --operations $(OPERATIONS)) $(ARGS)

study: $(READY)
	$(call STUDY,studies $(METHOD))

# The methods compared on the same text: one to two hours for SUITE=cpu, resumable run by run.
suite: $(READY)
	$(call STUDY,studies suite_$(SUITE))

# Hyperparameters of a study's runs, as its `search:` declares; resumable.
tune: $(READY)
	$(call STUDY,studies.tune $(METHOD))

test: check
	$(RUN) -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test-slow: $(READY)
	$(RUN) -m pytest -m slow

test-gpu: $(READY)
	$(RUN) -m pytest -m gpu

# The tests of torch-scatter, which is compiled for minutes and installed nowhere else.
test-scatter: $(VENV)/.scatter
	PYTHONPATH=$(VENV)/.scatter $(RUN) -m pytest tests/layers/test_segments.py

$(VENV)/.scatter: $(READY)
	$(PIP) install --quiet --no-build-isolation --no-deps --target $@ 'torch-scatter>=2.1'

# The lines of benchmarks/gpu.txt, each kept in one Markdown file as soon as it is measured; tests that
# guard correctness first. A line has ten minutes. Without a GPU: BENCH_LINES=FILE DEVICE=cpu.
BENCH ?= runs/bench-gpu.md
BENCH_LINES ?= benchmarks/gpu.txt
DEVICE ?= cuda
bench-gpu: $(READY)
	mkdir -p $(dir $(BENCH))
	$(RUN) -m pytest -q -m gpu tests/test_gpu.py 2>&1 | tee -a $(BENCH)
	grep -v '^#' $(BENCH_LINES) | while read -r line; do \
		timeout 600 $(RUN) -m benchmarks.$$line --device $(DEVICE) </dev/null >>$(BENCH) \
			|| printf '\nNot measured: `%s`\n' "$$line" >>$(BENCH); \
		tail -n 3 $(BENCH); \
	done

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The documentation site, in site/; warnings (broken links) are errors. It links to the repository that was cloned.
REPO_URL ?= $(shell git remote get-url origin 2>/dev/null | sed -n 's|^git@\([^:]*\):|https://\1/|; s|\.git$$||; /^https:/p')
docs: $(VENV)/.docs
	REPO_URL='$(REPO_URL)' NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo "site/index.html is built."

$(VENV)/.docs: $(READY)
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) data_cache runs site
