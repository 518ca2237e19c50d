# Targets: demo test test-all test-gpu test-newest-jax compile-27b lint format bench stubs locks clean, and venv, which the others need.
#
# Everything runs in .venv, made on first use from the hashed locks in requirements/. Variables:
#   PYTHON=/path/to/python   the interpreter to make .venv with (otherwise: the newest found, 3.12 to 3.14)
#   WORKERS=2                pytest's worker processes; 0 runs the tests in one process
#   ARGS="-k verify"         further arguments of pytest, the demo or the benchmark
#   GPU_PYTHON=python3       an interpreter that has jax for CUDA and the test tools, for `make test-gpu`
#   UPGRADE=--upgrade        lets `make locks` move to newer versions

SHELL := /bin/sh
.DELETE_ON_ERROR:
.PHONY: demo test test-all test-gpu test-newest-jax compile-27b lint format bench stubs locks clean venv

PYTHON ?=
WORKERS ?= 2
ARGS ?=
GPU_PYTHON ?= python3
UPGRADE ?=

BIN := .venv/bin
UV := $(BIN)/uv

demo: venv
	$(BIN)/atlas-jax demo $(ARGS)

test: venv .venv/.cuda-compile
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not long" $(ARGS)

test-all: venv .venv/.cuda-compile
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# The same tests with the newest jax there is, whatever pyproject.toml allows, and everything else as locked: what its next
# release takes away is seen here first. In .venv-newest, made anew each time.
NEWEST := .venv-newest/bin/python
NEWEST_INSTALL = $(UV) pip install --quiet --python $(NEWEST)

# The tests that say whether the kernels are right and rows exact, run with the kernels. Each worker takes a part of the card's memory.
GPU_TESTS := $(addprefix tests/test_, $(addsuffix .py, exactness ragged kernels w4a16 large_arrays))

test-gpu:
	JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_MEM_FRACTION=0.08 PYTHONPATH=. $(GPU_PYTHON) -m pytest -n 8 --dist worksteal \
		-p no:benchmark -W ignore::DeprecationWarning $(GPU_TESTS) $(ARGS)

test-newest-jax: .venv/.made
	@$(UV) venv --quiet --clear --python $(BIN)/python .venv-newest
	@printf 'jax\njaxlib\n' >.venv-newest/override.in
	@$(NEWEST_INSTALL) --no-verify-hashes --override .venv-newest/override.in -r requirements/dev.txt
	@$(NEWEST_INSTALL) --no-deps --no-build-isolation -e .
	@version=$$($(NEWEST) -c 'import jax; print(jax.__version__)'); echo "testing with jax $$version"; \
	$(NEWEST_INSTALL) --no-deps --target .venv-newest/cuda-compile \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version nvidia-cuda-nvcc
	JAX_COMPILATION_CACHE_DIR=.venv-newest/cache $(NEWEST) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# The published 27B shape's step for both GPUs, which takes minutes.
compile-27b: venv .venv/.cuda-compile
	PYTHONPATH=. $(BIN)/python tests/compile_step.py qwen3.5-27b $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	$(BIN)/python bench/decode.py $(ARGS)

# The gRPC stubs, which are committed: a test says when they are not what the proto gives.
stubs: venv
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. atlas_jax/serve/v1/atlas.proto

LOCK = $(UV) pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-emit-index-url \
	--no-emit-find-links --custom-compile-command "make locks" $(UPGRADE)

locks: .venv/.made
	$(LOCK) requirements/bootstrap.in -o requirements/bootstrap.txt
	$(LOCK) pyproject.toml --extra dev -c requirements/pins.in -o requirements/dev.txt
	$(LOCK) pyproject.toml -c requirements/pins.in -c requirements/dev.txt -o requirements/run.txt
	$(LOCK) --no-deps --group cuda-compile -c requirements/pins.in -o requirements/cuda-compile.txt
	@! grep -n '//' requirements/*.txt || { echo 'make locks: an address got into a lock, see above' >&2; exit 1; }

clean:
	rm -rf .venv .venv-newest .cache .hypothesis .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. Two stamps: the venv itself, and what is installed in it.

venv: .venv/.installed

.venv/.installed: .venv/.made requirements/dev.txt pyproject.toml
	@echo "installing requirements/dev.txt and the project into .venv"
	@$(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements/dev.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

# XLA's CUDA plugin and ptxas (190 MB to download) in a folder that only tests/deviceless.py knows.
.venv/.cuda-compile: .venv/.made requirements/cuda-compile.txt
	@echo "installing requirements/cuda-compile.txt into .venv/cuda-compile"
	@rm -rf .venv/cuda-compile
	@$(UV) pip install --quiet --python $(BIN)/python --require-hashes --no-deps --target .venv/cuda-compile \
		-r requirements/cuda-compile.txt
	@touch $@

# A name on PATH may be a shim that starts no interpreter, so each candidate is run, and says itself where it lies.
# Installing is the work of the locked uv, put into the venv by the uv on PATH if there is one, or else by the
# interpreter's own pip, which some distributions leave out.
define PROBE
import sys, sysconfig
assert sys.implementation.name == "cpython" and (3, 12) <= sys.version_info[:2] <= (3, 14)
assert not sysconfig.get_config_var("Py_GIL_DISABLED")
if "pip" in sys.argv: import ensurepip, venv
print(sys.executable)
endef
export PROBE

.venv/.made: | requirements/bootstrap.txt
	@set -e; \
	uv=$$(command -v uv || true); \
	needs=$${uv:-pip}; needs=$${needs##*/}; \
	versions="$${PYENV_ROOT:-$$HOME/.pyenv}/versions"; \
	python=; \
	if [ -n "$(PYTHON)" ]; then \
		python=$$("$(PYTHON)" -c "$$PROBE" $$needs) || { \
			echo "make: PYTHON=$(PYTHON) is not a working CPython 3.12 to 3.14 with pip" >&2; exit 1; }; \
	else \
		for name in python3.14 python3.13 python3.12 python3 python; do \
			for candidate in "$$name" "$$versions"/*/bin/"$$name"; do \
				python=$$("$$candidate" -c "$$PROBE" $$needs 2>/dev/null) && break 2 || python=; \
			done; \
		done; \
	fi; \
	if [ -z "$$python" ]; then \
		echo "make: found no CPython 3.12 to 3.14 (looked for python3.14, python3.13, python3.12 and python3 on PATH" >&2; \
		echo "and in $$versions). Install one, with its venv and pip modules, or name it: make PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi; \
	echo "making .venv with $$python"; \
	rm -rf .venv; \
	if [ -n "$$uv" ]; then \
		"$$uv" venv --quiet --python "$$python" .venv; \
		"$$uv" pip install --quiet --python $(BIN)/python --require-hashes -r requirements/bootstrap.txt; \
	else \
		"$$python" -m venv .venv; \
		$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r requirements/bootstrap.txt; \
	fi; \
	touch $@
