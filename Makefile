# From a fresh clone: `make quickstart` or `make test`. Each sets up what it needs in .venv, once.

PYTHON ?= python3
VENV := .venv
IN_VENV := $(VENV)/bin/python
INSTALL = $(IN_VENV) -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt

.DEFAULT_GOAL := help
.PHONY: help quickstart test check format docs clean

help:
	@echo "make quickstart   train a small LoRA on the CPU and see what each setting keeps and recomputes"
	@echo "make test         run the test suite"
	@echo "make check        lint, format check and types"
	@echo "make format       format the code"
	@echo "make docs         bring the generated tables in docs/ up to date"
	@echo "make clean        remove the virtual environment and caches"

quickstart: $(VENV)/.has-train
	$(VENV)/bin/lowtide train examples/quickstart/config.json

test: $(VENV)/.has-test
	OMP_NUM_THREADS=1 $(IN_VENV) -m pytest --numprocesses auto --dist worksteal

check: $(VENV)/.has-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(IN_VENV)

format: $(VENV)/.has-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.has-train
	$(IN_VENV) -m lowtide.cli.option_docs docs/*.md

# A stamp for each extra that is installed; a change of the requirements makes them old. Stamps are written last, so a
# set-up that was broken off is done again.
$(VENV)/.has-%: pyproject.toml constraints-cpu.txt | $(VENV)/.made
	@echo "Installing lowtide[$*] into $(VENV) (a few minutes the first time) ..."
	$(INSTALL) --editable '.[$*]'
	@touch $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "lowtide needs Python 3.11 or newer, but '$(PYTHON)' is not. Try: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed: see above. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
