# The commands of this repository. They need a Python (3.11 to 3.13) and a package index, nothing
# else: each makes .venv first, and again when pyproject.toml has changed.
#
#   make train [ARGS="--steps 100"]     train a byte-level GPT on real text, ZeRO-3, 2 x 4 devices
#   make test [ARGS="-k placement"]     the test suite (not the slow, nightly and full parts)
#   make test PYTHON=3.12               with another Python: a version, or a path
#   make train EXTRAS=cuda12            with the wheels for NVIDIA GPUs (cuda12 or cuda13)
#   make test-slow | test-full | test-nightly   the rest of the tests: 2 hours, many hours, hours
#   make check                          ruff, pyright and the smoke tests, in under two minutes
#   make lint                           ruff and pyright
#   make bench-memory | bench-NAME      run benchmarks/NAME.py
#   make gpu [ARGS="--only kernels"]    all of zeroxla on this machine's NVIDIA GPUs, in 10 minutes,
#                                       with the CUDA wheels that the driver needs (cuda13 or
#                                       cuda12; EXTRAS=cuda12 overrides); without a GPU, its
#                                       programs are lowered for CUDA, and compiled for an H200
#                                       with EXTRAS=plan-gpu
#   make peers                          zeroxla beside PyTorch and DeepSpeed over a slow network
#   make peers-islands                  islands over 100, 10 and 1 Mbit/s beside them, in 40 minutes
#   make gauntlet                       Flax models of the package index, as they are, through all of
#                                       zeroxla; goes on where it was stopped
#   make gauntlet ARGS="--only GPT-2"   one of them (--list prints the names)
#   make recordings                     record again what Transformers and PEFT compute with the tiny
#                                       models of the tests; ARGS="qwen3 phi3" names some
#   make docs                           the documentation site, into site/
#   make notebook                       open the notebooks in JupyterLab
#   make clean                          remove environments and caches; runs/ is kept

PYTHON ?=
EXTRAS ?=
ARGS   ?=

comma  := ,
empty  :=
space  := $(empty) $(empty)
VENV   := .venv
PY     := $(VENV)/bin/python
# What the environment was made for: its extras, then PYTHON= if it was given. Empty if there is no
# environment, or if its Python does not run any more.
HAVE   := $(shell $(PY) -c 'import pip' 2>/dev/null && cat $(VENV)/.made-for 2>/dev/null)
EXTRA_LIST := $(sort dev $(EXTRAS) $(subst $(comma),$(space),$(word 1,$(HAVE))))
MISSING := $(filter-out $(subst $(comma),$(space),$(word 1,$(HAVE))),$(EXTRA_LIST))
OTHER  := $(if $(PYTHON),$(filter-out $(word 2,$(HAVE)),$(PYTHON)))
STAMP  := $(VENV)/.installed
PEERS  := .venv-peers
GAUNTLET := .venv-gauntlet
RECORD := .venv-record

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-full test-nightly check lint docs notebook gpu peers peers-islands same-model \
    gauntlet recordings clean force

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

# The environment is also made again if it lacks an extra, or was made for another Python than
# PYTHON= asks for. Without PYTHON= any Python will do.
ifneq ($(MISSING)$(OTHER),)
$(STAMP): force
endif

$(STAMP): pyproject.toml scripts/pick_python
	@rm -f $@
	@set -e; \
	if [ -n "$(OTHER)" ] || ! $(PY) -c 'import pip' 2>/dev/null; then \
	    python=$$(PYTHON='$(PYTHON)' sh scripts/pick_python); \
	    echo "making $(VENV) with $$python"; \
	    "$$python" -m venv --clear $(VENV); \
	fi; \
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$(subst $(space),$(comma),$(EXTRA_LIST))]'; \
	echo '$(subst $(space),$(comma),$(EXTRA_LIST)) $(PYTHON)' > $(VENV)/.made-for; \
	touch $@

train: $(STAMP)
	$(VENV)/bin/zeroxla train $(ARGS)

test: $(STAMP)
	$(PY) -m pytest -n 2 -m "not nightly and not full and not slow" $(ARGS)

test-slow: $(STAMP)
	$(PY) -m pytest -n 2 -m "slow and not nightly and not full" $(ARGS)

test-full: $(STAMP)
	$(PY) -m pytest -n 2 -m "not nightly" $(ARGS)

test-nightly: $(STAMP)
	$(PY) -m pytest -n 2 -m "nightly" $(ARGS)

# Types are checked while the tests run: one process of the tests ends before the other.
check: $(STAMP)
	$(PY) -m ruff check .
	@$(PY) -m pyright > $(VENV)/types.txt & types=$$!; \
	$(PY) -m pytest -n 2 -m smoke $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.txt; \
	[ $$tests = 0 ] && [ $$types = 0 ]

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m pyright

bench-%: $(STAMP)
	$(PY) benchmarks/$(subst -,_,$*).py $(ARGS)

# An environment that has CUDA wheels keeps them: cuda12 and cuda13 do not go together.
gpu:
	@set -e; extra='$(filter cuda12 cuda13,$(EXTRA_LIST))'; \
	[ -n "$$extra" ] || extra=$$(sh scripts/cuda_extra); \
	$(MAKE) --no-print-directory setup EXTRAS="$(EXTRAS) $$extra"
	$(PY) benchmarks/gpu.py $(ARGS)

# Both run in an environment of their own, as root. A CPU build of torch will do, if pip finds one.
peers: same-model
	$(PY) benchmarks/two_hosts.py --peers $(PEERS)/bin/python $(ARGS)

peers-islands: same-model
	$(PY) benchmarks/two_hosts_islands.py --peers $(PEERS)/bin/python $(ARGS)

same-model: $(STAMP) $(PEERS)/.installed
	$(PY) benchmarks/peers/parity.py export $(PEERS)/weights.npz
	$(PEERS)/bin/python benchmarks/peers/parity.py compare $(PEERS)/weights.npz

$(PEERS)/.installed: benchmarks/peers/requirements.txt
	@rm -f $@
	@set -e; \
	python=$$(PYTHON='$(PYTHON)' sh scripts/pick_python); \
	echo "making $(PEERS) with $$python"; \
	"$$python" -m venv --clear $(PEERS); \
	pip="$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check"; \
	grep -v '^deepspeed' $< > $(PEERS)/first.txt; \
	$$pip -r $(PEERS)/first.txt; \
	DS_BUILD_OPS=0 $$pip --no-build-isolation -r $<; \
	touch $@

# Models need packages that zeroxla does not, some of them without their own requirements.
gauntlet: $(GAUNTLET)/.installed
	$(GAUNTLET)/bin/python benchmarks/gauntlet.py $(ARGS)

$(GAUNTLET)/.installed: pyproject.toml benchmarks/gauntlet_parts/requirements.txt \
    benchmarks/gauntlet_parts/requirements_alone.txt
	@rm -f $@
	@set -e; \
	python=$$(PYTHON='$(PYTHON)' sh scripts/pick_python); \
	echo "making $(GAUNTLET) with $$python"; \
	"$$python" -m venv --clear $(GAUNTLET); \
	pip="$(GAUNTLET)/bin/python -m pip install --quiet --disable-pip-version-check"; \
	$$pip -e . -r benchmarks/gauntlet_parts/requirements.txt; \
	$$pip --no-deps -r benchmarks/gauntlet_parts/requirements_alone.txt; \
	touch $@

# Strictly: a broken link, or a public name that cannot be found, is an error.
recordings: $(RECORD)/.installed
	$(RECORD)/bin/python tests/fixtures/families/record.py $(ARGS)
	$(RECORD)/bin/python tests/fixtures/make_peft.py

$(RECORD)/.installed: tests/fixtures/requirements.txt
	@rm -f $@
	@set -e; \
	python=$$(PYTHON='$(PYTHON)' sh scripts/pick_python); \
	echo "making $(RECORD) with $$python"; \
	"$$python" -m venv --clear $(RECORD); \
	$(RECORD)/bin/python -m pip install --quiet --disable-pip-version-check -r $<; \
	touch $@

docs:
	@$(MAKE) --no-print-directory setup EXTRAS="$(EXTRAS) docs"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

notebook:
	@$(MAKE) --no-print-directory setup EXTRAS="$(EXTRAS) notebook"
	$(VENV)/bin/jupyter lab notebooks

clean:
	rm -rf .venv .venv-oldest .venv-peers .venv-gauntlet .venv-record .cache .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
