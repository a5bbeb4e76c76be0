# make run | test | board | lab: each installs once into .venv (again when pyproject.toml changes).
PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
ARGS ?=
PHASES ?= 1,2,3,4
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cksum < pyproject.toml | cut -d' ' -f1)

# Bytecode is written at the first import, not for 19,000 files at install: where the environment forbids it, every process would compile anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: run test lab board install

run: $(STAMP)
	$(BIN)/labkit run $(MODEL) --phases $(PHASES) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n auto $(ARGS)

board: $(STAMP)
	$(BIN)/labkit board $(ARGS)

lab: $(STAMP)
	$(BIN)/jupyter lab notebooks

install: $(STAMP)

$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -e '.[test]'
	rm -f $(VENV)/.installed-* && touch $@
