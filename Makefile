# make demo    set everything up, then train, score and show a small translator on the embedded corpus
# make test    set everything up; lint, types, import contracts and tests
# make test-ray the grid of studies on a real Ray cluster of this machine
# make test-oldest the tests with the oldest versions that pyproject.toml asks for, in a folder of their own; some of
#              them were never built for Python 3.13: name an older one with PYTHON=python3.12
# make lint    lint, types and import contracts alone
# make bench   the attention benchmark on this machine

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OLDEST := .venv-oldest
PIP    := -m pip install --quiet --no-compile --disable-pip-version-check

.PHONY: demo test test-ray test-oldest lint bench setup clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qknorm needs Python 3.11 or newer; name one with make PYTHON=python3.12")'
	@echo "setting up $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) --constraint constraints.txt --editable '.[dev,formats,tensorboard,serve,onnx,ctranslate2,huggingface]'
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python -m qknorm demo

test: lint
	@$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -p no:schemathesis -m "not ray"

test-ray: $(READY)
	@$(BIN)/python $(PIP) --constraint constraints.txt --editable '.[ray]'
	@$(BIN)/python -m pytest -m ray

test-oldest:
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python $(PIP) --constraint constraints-oldest.txt --editable '.[formats,tensorboard,serve,onnx,ctranslate2]' httpx hypothesis pytest pytest-xdist scipy
	@$(OLDEST)/bin/python -m pytest --numprocesses 2 --dist worksteal -m "not ray"

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(READY)
	@$(BIN)/python benchmarks/attention.py

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis
