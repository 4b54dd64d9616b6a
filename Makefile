# Each target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "HyperDFlash needs Python 3.11 or newer: make PYTHON=python3.11")'
# A file's tests share fixtures, so a file stays with one of the two processes
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
TINY := examples/tiny
OF_TINY := tiny tiny-corpus tiny-texts tiny-drafter tiny-baselines tiny-heads
OF_SERVING := test-vllm test-vllm-engines test-vllm-acceptance test-vllm-tiny test-vllm-pair test-vllm-sources test-sglang

.PHONY: demo test test-fast nightly device lint bench clean $(OF_TINY) $(OF_SERVING)
# Two targets of one of the other Makefiles would build what both need at the same time
.NOTPARALLEL:

demo: $(STAMP)  ## the tiny target with and without its drafter
	$(BIN)/hyperdflash demo

test: $(STAMP)  ## every behaviour, on two cores
	$(PYTEST) -m "not nightly"

test-fast: $(STAMP)  ## without the tests marked slow
	$(PYTEST) -m "not nightly and not slow"

nightly: $(STAMP)  ## what `make test` leaves out: more cases of the same behaviours
	$(PYTEST) -m nightly

device: $(STAMP)  ## what only a GPU can tell: losslessness, times, a training step; under ten minutes
	$(BIN)/python tests/device_check.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(STAMP)  ## where the time of a round goes
	for drafter in drafter-paper drafter; do \
	  echo $$drafter && $(BIN)/python -m hyperdflash.benchmark.profile_rounds --drafter $(TINY)/$$drafter || exit; \
	done

$(OF_TINY): $(STAMP)  ## rebuild the tiny world, or what the documents compare
	$(MAKE) -f $(TINY)/Makefile $@

$(OF_SERVING): $(STAMP)  ## the drafter in vLLM's engine, and in SGLang's modules
	$(MAKE) -f serving/Makefile $@

$(STAMP): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) serving/.venv-vllm serving/build .pytest_cache .ruff_cache *.egg-info
