# Conveniences over the README's commands.
VENV ?= .venv
PIP = $(VENV)/bin/pip

.PHONY: dev native test soak lint bench clean

dev:  ## an environment with everything a developer uses
	python3 -m venv $(VENV)
	$(PIP) install -e '.[llamacpp,test,dev,bench]'

native:  ## compile csrc/ again
	$(VENV)/bin/python setup.py -q build_ext --inplace

test:
	$(VENV)/bin/pytest -n 2

soak:  ## slow load and endurance runs
	$(VENV)/bin/pytest -m soak

lint:
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench:
	$(VENV)/bin/superfluid bench throughput
	$(VENV)/bin/superfluid bench overhead

clean:
	rm -rf build *.egg-info superfluid/_native.*
