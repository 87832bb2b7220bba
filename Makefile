# The verbs. An environment whose python3 has torch is used as it is; else .venv is made, with CPU torch where no GPU is.
#   make bench [FULL=1] · make test · make lint · make gpu [OUT=DIR]      ARGS=... goes to the program behind the verb
#   make gpu-train RUN=TASK/ROW [DATA=DIR] [OUT=DIR] [FROM=DIR] [PART=N] [MINUTES=N]      .ci/gpu_train.py says how
TORCH ?= torch==2.13.0
HAVE := $(shell python3 -c 'import importlib.metadata as m, sys, zlib; m.version("torch"); print(zlib.crc32(sys.prefix.encode()))' 2>/dev/null)
PYTHON := $(if $(HAVE),python3,.venv/bin/python)
INSTALLED := $(if $(HAVE),.stamps/$(HAVE),.venv/installed)
PIP := $(PYTHON) -m pip install --disable-pip-version-check -qq
SOURCES := setup.py pyproject.toml $(wildcard csrc/* csrc/*/*)

.PHONY: bench test lint gpu gpu-train
bench: $(INSTALLED)
	$(PYTHON) -m fusedseq bench $(if $(FULL),--full) $(ARGS)

test: $(INSTALLED)
	$(PYTHON) -m pytest $(or $(ARGS),-n auto)
	$(if $(ARGS),,$(PYTHON) -m pytest -n auto --device triton)

lint: $(INSTALLED)-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# Needs no network where python3 has torch: built in place, nothing is installed.
gpu:
	@[ -n "$$FUSEDSEQ_FAKE_GPU" ] || nvidia-smi -L >/dev/null 2>&1 || \
		{ echo 'make gpu: needs a GPU, and nvidia-smi finds none here' >&2; exit 2; }
	$(if $(HAVE),,@$(MAKE) $(INSTALLED))
	@$(PYTHON) .ci/gpu.py $(if $(OUT),--out '$(OUT)') $(ARGS)

gpu-train:
	$(if $(HAVE),,@$(MAKE) $(INSTALLED))
	@$(PYTHON) .ci/gpu_train.py --run '$(RUN)' $(if $(DATA),--data '$(DATA)') $(if $(OUT),--out '$(OUT)') \
		$(if $(FROM),--from '$(FROM)') $(if $(PART),--part $(PART)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

$(INSTALLED): $(SOURCES) $(if $(HAVE),,.venv/torch)
	$(PIP) 'setuptools>=77' wheel pybind11 ninja
	$(PIP) --no-build-isolation -e '.[test]'
	@mkdir -p $(@D) && touch $@

$(INSTALLED)-dev: $(SOURCES) $(if $(HAVE),,.venv/torch)
	$(PIP) 'setuptools>=77' wheel pybind11 ninja
	$(PIP) --no-build-isolation -e '.[dev]'
	@mkdir -p $(@D) && touch $(INSTALLED) $@

# A CPU build of torch carries +cpu in its version; pip has it where an index or a --find-links of yours does.
.venv/torch:
	python3 -m venv .venv
	@if ! nvidia-smi >/dev/null 2>&1 && $(PIP) '$(TORCH)+cpu' 2>/dev/null; then :; else $(PIP) '$(TORCH)'; fi
	@touch $@
