# Each target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "HyperDFlash needs Python 3.11 or newer: make PYTHON=python3.11")'
TINY := examples/tiny
CLOSURE := configuration_hyperdflash.py modeling_hyperdflash.py cache_hyperdflash.py generation_hyperdflash.py \
  pairing_hyperdflash.py
# Large blocks from the heap instead of fresh pages: a third faster for training on the CPU.
TRAIN := MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456 $(BIN)/python

# vLLM pins other versions of transformers and more, so it has an environment of its own
VLLM := serving/.venv-vllm
VLLM_STAMP := $(VLLM)/.installed
IN_VLLM := OMP_NUM_THREADS=1 VLLM_CACHE_ROOT=$(CURDIR)/serving/build/cache $(VLLM)/bin/python

# SGLang's sources are read, never installed
SGLANG := serving/build/sglang

# Everything that docs/evidence.md compares, and the prompts that nothing was trained or chosen on
RUNS := $(TINY)/build/baselines
HELD_OUT := $(TINY)/build/prompts/heldout/code.jsonl $(TINY)/build/prompts/heldout/math.jsonl $(TINY)/build/prompts/heldout/chat.jsonl
seeds = $(RUNS)/$(1)-42/final,$(RUNS)/$(1)-43/final,$(RUNS)/$(1)-44/final
short = $(RUNS)/ablation-$(1)/final,$(RUNS)/ablation-$(1)-43/final,$(RUNS)/ablation-$(1)-44/final
results = mkdir -p docs/results/$(1) && cp $(TINY)/build/benchmarks/$(1)/*.* docs/results/$(1) && \
  rm docs/results/$(1)/records.jsonl docs/results/$(1)/settings.json
BENCHMARK := $(BIN)/hyperdflash benchmark $(TINY)/target --prompts $(HELD_OUT) --num-prompts 30 --max-new-tokens 128 \
  --dtype float32 --threads 1

.PHONY: demo test test-fast test-vllm test-vllm-engines test-vllm-acceptance test-vllm-tiny test-vllm-pair test-sglang lint \
  bench closure tiny tiny-corpus tiny-texts tiny-drafter tiny-baselines tiny-heads clean

demo: $(STAMP)  ## the tiny target with and without its drafter
	$(BIN)/hyperdflash demo

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest

test-fast: $(STAMP)  ## without the tests marked slow
	$(BIN)/python -m pytest -m "not slow"

test-vllm:  ## the drafter in vLLM's engine on two CPU cores, set-up of vLLM (3.4 GB) included
	$(MAKE) -j2 test-vllm-engines test-vllm-acceptance

test-vllm-engines: test-vllm-tiny $(VLLM_STAMP)
	$(IN_VLLM) -m pytest serving/tests --ignore serving/tests/test_acceptance.py

test-vllm-acceptance: test-vllm-pair $(VLLM_STAMP)
	$(IN_VLLM) -m pytest serving/tests/test_acceptance.py

test-vllm-tiny: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python serving/tests/make_tiny.py

test-vllm-pair: test-vllm-tiny
	OMP_NUM_THREADS=1 $(BIN)/python serving/tests/train_tiny.py make

test-sglang: $(STAMP) $(SGLANG)/.unpacked  ## what serving in SGLang would rest on, in its sources (39 MB); no engine
	$(BIN)/python -m pytest serving/sglang

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(STAMP)  ## where the time of a round goes
	for drafter in drafter-paper drafter; do \
	  echo $$drafter && $(BIN)/python -m hyperdflash.generation.speed --drafter $(TINY)/$$drafter || exit; \
	done

closure:  ## copy the code that the Hub loads into the example drafters
	for drafter in $(wildcard $(TINY)/drafter*/); do \
	  mkdir -p $$drafter/custom_generate && cp $(CLOSURE) $$drafter && cp custom_generate/generate.py $$drafter/custom_generate; \
	done

tiny: $(STAMP)  ## rebuild the tiny world from nothing: hours, resumable
	$(MAKE) tiny-corpus
	$(BIN)/python $(TINY)/tokenizer.py
	OMP_NUM_THREADS=1 $(TRAIN) $(TINY)/train_target.py
	$(BIN)/python $(TINY)/prompts.py
	OMP_NUM_THREADS=1 $(TRAIN) $(TINY)/post_train.py
	$(MAKE) tiny-texts
	$(MAKE) tiny-drafter

tiny-corpus: $(STAMP)  ## documents of three domains
	$(BIN)/pip install -q -c constraints.txt -r $(TINY)/requirements.txt
	$(BIN)/python $(TINY)/corpus.py $(CORPUS_OPTIONS)

tiny-texts: $(STAMP)  ## what the tiny target writes, for its drafters, and the held-out prompts: an hour, resumable
	test -e $(TINY)/build/train-chat.jsonl || $(MAKE) tiny-corpus
	$(BIN)/python $(TINY)/prompts.py
	for part in code:192 math:128 chat:64; do \
	  domain=$${part%:*}; write="data regenerate --target $(TINY)/target --dtype float32 --threads 1 --batch-size 96 \
	    --max-new-tokens $${part#*:}"; texts=$(TINY)/build/texts; mkdir -p $$texts; \
	  for name in greedy valid; do \
	    $(TRAIN) -m hyperdflash $$write $(TINY)/build/prompts/$$name-$$domain.jsonl --output $$texts/$$name-$$domain.jsonl \
	    || exit 1; done; \
	  $(TRAIN) -m hyperdflash $$write $(TINY)/build/prompts/sampled-$$domain.jsonl --temperature 1 \
	    --output $$texts/sampled-$$domain.jsonl || exit 1; \
	  cat $$texts/greedy-$$domain.jsonl $$texts/sampled-$$domain.jsonl > $$texts/train-$$domain.jsonl; \
	done

tiny-drafter: $(STAMP)  ## train the tiny drafters again, with heads and without: about an hour, resumable
	OMP_NUM_THREADS=1 $(BIN)/python -m hyperdflash features training/recipes/tiny_headline.yaml
	OMP_NUM_THREADS=1 $(TRAIN) $(TINY)/baselines.py --only hyperdflash-42 markov-42
	cp -r $(RUNS)/hyperdflash-42/final/. $(TINY)/drafter-paper/
	cp -r $(RUNS)/markov-42/final/. $(TINY)/drafter/
	$(MAKE) closure

tiny-baselines: $(STAMP)  ## train and measure everything that docs/evidence.md compares: a day on one core, resumable
	test -e $(TINY)/build/texts/train-chat.jsonl || $(MAKE) tiny-texts
	OMP_NUM_THREADS=1 $(BIN)/python -m hyperdflash features training/recipes/tiny_headline.yaml
	OMP_NUM_THREADS=1 $(TRAIN) $(TINY)/baselines.py --only headline ablations seeds texts
	$(BENCHMARK) --temperatures 0 1 --output $(TINY)/build/benchmarks/headline --methods prompt-lookup:6 mtp:3 mtp:6 \
	  mtp:3=$(call seeds,mtp) mtp:6=$(call seeds,mtp) dflash:6=$(call seeds,dflash) fc:6=$(RUNS)/fc-42/final \
	  mean:6=$(call seeds,mean) hyperdflash:6=$(call seeds,hyperdflash)
	$(BENCHMARK) --output $(TINY)/build/benchmarks/ablations --methods $(shell $(BIN)/python $(TINY)/baselines.py --methods)
	$(BENCHMARK) --output $(TINY)/build/benchmarks/seeds --methods hyperdflash:6=$(call short,base) dflash:6=$(call short,dflash)
	$(BENCHMARK) --temperatures 0 1 --output $(TINY)/build/benchmarks/texts \
	  --methods hyperdflash:6=$(RUNS)/ablation-base/final,$(RUNS)/texts-sampled/final
	$(call results,headline)
	$(call results,ablations)
	$(call results,seeds)
	$(call results,texts)
	rm docs/results/ablations/*.png docs/results/seeds/*.png docs/results/texts/*.png  # not shown anywhere
	OMP_NUM_THREADS=1 $(BIN)/python $(TINY)/paths.py
	$(BIN)/python $(TINY)/evidence.py

tiny-heads: tiny-baselines  ## the same for the heads beyond the paper: some hours more, resumable
	OMP_NUM_THREADS=1 $(TRAIN) $(TINY)/baselines.py --only heads
	$(BENCHMARK) --temperatures 0 1 --output $(TINY)/build/benchmarks/heads --methods mtp:6 mtp:6=$(call seeds,mtp) \
	  hyperdflash:6=$(call seeds,hyperdflash) hyperdflash+markov:6=$(call seeds,markov) \
	  hyperdflash+markov+confidence:6=$(call seeds,markov) mean+markov:6=$(call seeds,mean-markov) \
	  dspark-like:6=$(call seeds,dspark-like)
	$(call results,heads)
	rm docs/results/heads/*.png  # the benchmark's, not shown anywhere
	OMP_NUM_THREADS=1 $(BIN)/python $(TINY)/calibration.py $(RUNS)/markov-42/final docs/results/heads
	OMP_NUM_THREADS=1 $(BIN)/python $(TINY)/selector.py $(RUNS)/markov-42/final docs/results/heads/selector.json
	OMP_NUM_THREADS=1 $(BIN)/python $(TINY)/first_slot.py $(RUNS) docs/results/heads/first_slot.json
	$(BIN)/python $(TINY)/evidence.py

$(STAMP): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

$(VLLM_STAMP): serving/requirements-vllm.txt serving/vllm_plugin/pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q --no-deps -r serving/requirements-vllm.txt
	$(VLLM)/bin/pip install -q --no-deps --no-build-isolation -e serving/vllm_plugin
	@touch $@

$(SGLANG)/.unpacked: serving/sglang/requirements.txt
	rm -rf $(SGLANG)
	$(BIN)/pip download -q --no-deps --only-binary :all: --python-version 3.11 --platform manylinux_2_34_x86_64 \
	  --require-hashes -d $(SGLANG) -r $<
	$(BIN)/python -m zipfile -e $(SGLANG)/sglang-*.whl $(SGLANG)
	rm $(SGLANG)/*.whl
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) serving/build .pytest_cache .ruff_cache *.egg-info
