# Two commands matter: `make test` and `make book`. Both set up their own .venv first.
# Choose an interpreter with `make PYTHON=python3.12 ...`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
QUICK := not slow and not gpu

.PHONY: help setup test test-all test-gpu lint book lab evidence clean

help:
	@echo "make book      run every chapter on this machine and build the HTML"
	@echo "make test      lint and all quick tests"
	@echo "make test-all  the slow tests as well; make test-gpu: the tests that need a GPU"
	@echo "make lab       JupyterLab on the chapters"
	@echo "make evidence  the longer runs whose results the book keeps (resumable)"
	@echo "make clean     remove what was built; runs/ and data/ stay (make clean-all: those too)"

# The marker tells an interrupted installation from a finished one: after an interruption the
# environment is made anew, since pip does not repair a package that it copied half of.
$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("This project needs Python 3.11 or newer and found %d.%d; run it as: make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@if [ -e .venv/installing ] || [ ! -x $(BIN)/python ]; then $(PYTHON) -m venv --clear .venv; fi
	@touch .venv/installing
	@echo "Installing into .venv: about 3 minutes and 2 GB (more where pip picks a CUDA build)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off -r requirements.txt -e '.[test]' > .venv/install.log 2>&1 \
	  || { tail -n 20 .venv/install.log; echo "The installation failed; the whole log is .venv/install.log. Run the same command again to retry."; exit 1; }
	@rm -f .venv/installing
	@touch $@

setup: $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile -m "$(QUICK)"

test-all: lint
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

book: $(STAMP)
	$(BIN)/python -m book.build

lab: $(STAMP)
	$(BIN)/jupyter lab book

evidence: $(STAMP)
	$(BIN)/python -m book.evidence
	$(BIN)/python -m book.searches

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: clean-all
clean-all: clean
	rm -rf .venv runs data
