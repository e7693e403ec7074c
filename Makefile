# `make audit` and `make test` work on a fresh machine: they create .venv, install, and run. `make audit` installs only
# what an audit needs; everything else installs what the tests need on top of that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.installed-core
STAMP := $(VENV)/.installed
OUT ?= audit
THRESHOLD ?= 1.1
PARALLEL ?= -n 2 --dist loadfile

.PHONY: audit test test-all fingerprints tested verdicts mutants mutants-random fuzz budgets bench bench-compare bench-quick lint format reference docs clean

audit: $(CORE)  ## the main job: several methods on digits, attacked and reported
	$(BIN)/fedaudit audit --out $(OUT) --jobs 2

# Processes that tests start import what the first of them compiled, also where the environment says not to keep it.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: $(STAMP)  ## the test suite, without what takes minutes
	$(BIN)/python -m pytest $(PARALLEL)

test-all: $(STAMP)  ## everything
	$(BIN)/python -m pytest $(PARALLEL) -m ""

fingerprints: $(STAMP)  ## what tiny runs of all methods send, kept anew: only for a change that is meant (CASES="fedavg dfrd")
	$(BIN)/python tests/helpers/tools/fingerprint.py $(CASES)

tested: $(STAMP)  ## test what the package's methods declare, and keep the verdicts: for those edited since (METHODS="fedavg dfrd": for these)
	$(BIN)/fedaudit check-method $(or $(METHODS),edited) --write

verdicts: $(STAMP)  ## whether the kept verdicts are of the methods as they are now
	$(BIN)/python -m pytest -q -n0 -m slow tests/trust/test_check_method.py -k was_tested_as_it_is

mutants: $(STAMP)  ## wrong edits of the code that tests must notice; ARGS="--only ledger", ARGS="--slice 3/20", ARGS=--sort
	$(BIN)/python tests/helpers/tools/mutants.py $(ARGS)

mutants-random: $(STAMP)  ## wrong edits that nobody picked, drawn at random: N=200, SEED=0, ROOMS=fedaudit/privacy; COVER=1 first sees which test covers which line
	$(if $(COVER),$(BIN)/python tests/helpers/tools/random_mutants.py --cover,$(BIN)/python tests/helpers/tools/random_mutants.py --number $(or $(N),200) --seed $(or $(SEED),0) --rooms "$(ROOMS)")

fuzz: $(STAMP)  ## mutated messages, run folders, data and TOML files: nothing but our errors; NUMBER=1000000, SEED=0
	$(BIN)/python tests/helpers/tools/fuzz.py --number $(or $(NUMBER),1000000) --seed $(or $(SEED),0)

budgets: $(STAMP)  ## what the project's own methods send, held against the budgets beside the tests
	out=$$(mktemp -d) && $(BIN)/fedaudit audit tests/budget_runs.toml --out $$out && \
	$(BIN)/fedaudit check $$out/runs/* --budget tests/budgets.toml && rm -rf $$out

bench: $(STAMP)  ## benchmarks: they report times, gate ratios measured in one run, and save under .benchmarks
	$(BIN)/python -m pytest benchmarks --import-mode=prepend -m "" --benchmark-columns=min,median,max,rounds --benchmark-autosave

bench-compare: $(STAMP)  ## what changed by more than its noise between two savings: the latest two, or A=... B=...; fails beyond THRESHOLD
	$(BIN)/python benchmarks/compare.py $(A) $(B) --threshold $(THRESHOLD)

bench-quick: $(STAMP)
	$(BIN)/python -m pytest benchmarks --import-mode=prepend --benchmark-columns=min,median,max,rounds

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

reference: $(STAMP)  ## docs/reference/commands.md and settings.md, made anew from the code
	$(BIN)/python tests/helpers/tools/reference_pages.py --write

docs: $(STAMP)  ## the documentation as a site, in build/site; a broken link or reference fails
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]" && $(BIN)/mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# Without PYTHONWARNINGS setuptools prints a box about folders that take precedence. There is nothing to be done about it.
$(CORE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e "."
	touch $(CORE)

$(STAMP): $(CORE)
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e ".[ray,flower,hf,pandas,tensorboard,mlflow,wandb,test]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks
