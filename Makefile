# The commands of the project. A python3 that has torch is used as it is; otherwise .venv is created,
# with a CPU build of torch where no GPU is found.
#   make demo                build, train two small models and use them, time five operators: a minute
#   make bench [FULL=1]      build, run the benchmark suite, print the table (results in build/bench)
#   make test                the tests for users, at most 10 minutes on two cores
#   make test-all            every test, as CI runs them
#   make lint | format       check, or write, the formatting; lint also checks the types
#   make wheels [ARGS=...]   build the sdist and the wheels in dist, and check them
#   make docs                build the documentation site in build/site
#   make gpu [OUT=DIR]       build, test and benchmark on a GPU: tools/gpu/run.py
#   make gpu-train RUN=TASK/NAME [DATA=DIR] [OUT=DIR] [FROM=DIR] [PART=N] [MINUTES=N]: tools/gpu/train.py
# ARGS=... is passed on to the program that a command starts. A build has CUDA kernels where there is
# a CUDA toolkit, and torch is a CUDA build or the machine has a GPU, or FUSEDSEQ_CUDA=1 is set: see
# docs/variables.md.
TORCH ?= torch==2.13.0
# A pipe fails if any of its commands does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Two builds at once would write the same files.
.NOTPARALLEL:
HAVE := $(shell python3 tools/build_stamp.py 2>/dev/null)
PYTHON := $(if $(HAVE),python3,.venv/bin/python)
INSTALLED := $(or $(HAVE),.venv/installed)
PIP := $(PYTHON) -m pip install --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(wildcard csrc/* csrc/*/* csrc/*/*/*)

.PHONY: demo bench test test-all test-slow test-tools test-triton lint format docs wheels gpu gpu-train
demo: $(INSTALLED)
	$(PYTHON) -m fusedseq demo $(ARGS)

bench: $(INSTALLED)
	$(PYTHON) -m fusedseq bench $(if $(FULL),--full) $(ARGS)

# The operators on the CPU, the modules, models and tasks, without the tests marked slow.
test: $(INSTALLED)
	$(PYTHON) -m pytest $(or $(ARGS),-n auto -m 'not slow' tests/operators tests/modules tests/integrations tests/tasks)

# What CI runs: the tests of `make test` and the slow ones, those of compilers, simulated CUDA kernels,
# packaging and benchmarks, and the Triton kernels in Triton's interpreter. Of the slowest tests and of
# the files that compile the CUDA sources for minutes, a part runs, others after each change of the
# sources: see tests/support/sampling.py. EVERY=1 runs all, SPARSE=3 a third of the part. UNTIL=SECONDS
# skips those of the part that `make test-tools` has not started at that time (seconds since 1970).
SPARSE ?= 1
SAMPLE = $(if $(EVERY),,--sample=$(SPARSE))
test-all: test $(if $(ARGS),,test-slow test-triton test-tools)
test-slow: $(INSTALLED)
	$(PYTHON) -m pytest -n auto -m slow tests/operators tests/modules tests/integrations tests/tasks
test-tools: $(INSTALLED)
	$(PYTHON) -m pytest -n auto $(SAMPLE) $(if $(UNTIL),--until=$(UNTIL)) tests/triton tests/simt tests/ptx tests/memory_model tests/packaging tests/benchmarks
test-triton: $(INSTALLED)
	$(PYTHON) -m pytest -n auto $(SAMPLE) --device triton

CLANG_FORMAT = git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | \
	xargs -r $(PYTHON) -c 'import clang_format; clang_format.clang_format()'
lint: $(INSTALLED)-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror
	$(PYTHON) -m mypy

format: $(INSTALLED)-dev
	$(PYTHON) -m ruff check --fix --quiet .
	$(PYTHON) -m ruff format .
	$(CLANG_FORMAT) -i

# The pages come from the sources by static analysis. The variable silences an advertisement of mkdocs-material.
docs: $(INSTALLED)-dev
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

wheels: $(INSTALLED)-dev
	$(PYTHON) -m tools.wheels $(ARGS)

# Needs no network where python3 has torch: built in place, nothing is installed.
gpu:
	@[ -n "$$FUSEDSEQ_FAKE_GPU" ] || nvidia-smi -L >/dev/null 2>&1 || \
		{ echo 'make gpu: needs a GPU, and nvidia-smi finds none here' >&2; exit 2; }
	$(if $(HAVE),,@$(MAKE) $(INSTALLED))
	@$(PYTHON) -m tools.gpu.run $(if $(OUT),--out '$(OUT)') $(ARGS)

gpu-train:
	$(if $(HAVE),,@$(MAKE) $(INSTALLED))
	@$(PYTHON) -m tools.gpu.train --run '$(RUN)' $(if $(DATA),--data '$(DATA)') $(if $(OUT),--out '$(OUT)') \
		$(if $(FROM),--from '$(FROM)') $(if $(PART),--part $(PART)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

# pip hides what a build prints. So the libraries are built before it, with a line per source, and pip
# finds nothing left to compile.
define install
	@echo 'fusedseq: installing what the build needs'
	@$(PIP) -q 'setuptools>=77' wheel pybind11 ninja
	@$(PYTHON) setup.py -q build_ext --inplace
	@echo 'fusedseq: installing the package, and what its tests and benchmarks need'
	@$(PIP) -q --no-build-isolation -e '.[$(1)]'
endef
$(INSTALLED): $(SOURCES) $(if $(HAVE),,.venv/torch)
	$(call install,test)
	@mkdir -p $(@D) && touch $@

$(INSTALLED)-dev: $(SOURCES) $(if $(HAVE),,.venv/torch)
	$(call install,dev)
	@mkdir -p $(@D) && touch $(INSTALLED) $@

# A CPU build of torch carries +cpu in its version; pip has it where an index or a --find-links of yours does.
.venv/torch:
	@echo 'fusedseq: no python3 with torch was found; creating .venv with $(TORCH)'
	@python3 -m venv .venv
	@if ! nvidia-smi >/dev/null 2>&1 && $(PIP) '$(TORCH)+cpu' 2>/dev/null; then :; else $(PIP) '$(TORCH)'; fi
	@touch $@
