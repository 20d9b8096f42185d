# make demo    set everything up, then train, score and show a small translator on the embedded corpus
# make test    set everything up; lint, types, import contracts and tests
# make test-ray the grid of studies on a real Ray cluster of this machine
# make lint    lint, types and import contracts alone
# make bench   the attention benchmark on this machine

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-ray lint bench setup clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qknorm needs Python 3.11 or newer; name one with make PYTHON=python3.12")'
	@echo "setting up $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev,formats,tensorboard,serve,onnx,ctranslate2,huggingface]'
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python -m qknorm demo

test: lint
	@$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -p no:schemathesis -m "not ray"

test-ray: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	@$(BIN)/python -m pytest -m ray

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(READY)
	@$(BIN)/python benchmarks/attention.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
