# make demo | test | build | format | check-format | clean
# Each does the set-up it needs (scripts/setup.sh). MAX_JOBS=N limits the compile jobs.
SHELL := /bin/bash
PYTHON := .venv/bin/python

.PHONY: build setup demo test format check-format clean

build: setup
	@scripts/build.sh cpu

setup:
	@scripts/setup.sh

demo: setup
	@MOK_TARGET=mok_torch scripts/build.sh cpu
	@$(PYTHON) examples/train_lm.py $(DEMO_ARGS)

test:
	@scripts/test.sh

format: setup
	@scripts/format.sh

check-format: setup
	@scripts/format.sh --check

# Leaves .venv, whose packages are slow to fetch.
clean:
	@rm -rf build dist
