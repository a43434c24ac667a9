# Everything a newcomer needs: `make quickstart` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUNS ?= runs/quickstart
STAMP := $(VENV)/.installed
# processes that run tests, with 3 GB of memory each: two more than two cores, as some tests wait
JOBS ?= 4
PYTEST = pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# one thread per process: else the threads of one wait for cores that another process has
test test-apart test-changed test-fast test-others test-oldest coverage durations: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-apart test-changed test-fast test-others test-cluster test-oldest durations rows coverage acceptance check format docs release clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv and install fedsim with its test and development tools

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("fedsim needs Python >= 3.11; call make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing fedsim and PyTorch into $(VENV): several GB, 2 to 5 minutes on a fast line"
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

quickstart: $(STAMP)  ## train FedPav and Local on synthetic people (about a minute) and compare them
	rm -f $(RUNS)/people.png
	$(BIN)/fedsim data preview --output $(RUNS)/people.png
	$(BIN)/fedsim fit --config configs/quickstart.yaml --run_dir $(RUNS)/fedpav --overwrite true
	$(BIN)/fedsim fit --config configs/quickstart.yaml --config configs/methods/local.yaml --run_dir $(RUNS)/local --overwrite true
	@echo
	@$(BIN)/fedsim report $(RUNS)/fedpav $(RUNS)/local --figure $(RUNS)/report.png
	@echo "pictures: $(RUNS)/people.png (the data), $(RUNS)/report.png (the result)"
	@echo "more: $(BIN)/fedsim report $(RUNS)/fedpav --queries worst --confusion (ranked images of wrong queries, and mixed-up data sets)"
	@echo "      $(BIN)/fedsim report $(RUNS)/fedpav $(RUNS)/local --html $(RUNS)/report.html (all of it as a page)"

test: $(STAMP)  ## test each part of fedsim on some configs, rows and random cases, in four processes (JOBS=8: in eight)
	$(BIN)/python -m $(PYTEST) -m "not others and not cluster and not apart"

test-apart: $(STAMP)  ## test on a simulated GPU, and the site and the wheel, as CI does
	$(BIN)/python -m $(PYTEST) -m "apart and not others and not cluster"

BASE ?= main
test-changed: $(STAMP)  ## test the rooms that the branch has changed since BASE, and all that know them, also on a simulated GPU
	$(BIN)/python -m $(PYTEST) -m "not others and not cluster" $$(PYTHONPATH=src:tests $(BIN)/python tests/changed.py $(BASE))

SHARE ?= 1/1
test-others: $(STAMP)  ## test each part on the configs, rows and random cases that `make test` leaves out (SHARE=2/12: the second twelfth)
	$(BIN)/python -m $(PYTEST) -m "others and not cluster" --share $(SHARE)

test-cluster: $(STAMP)  ## run the tests on a real Slurm with virtual nodes, and under torchrun: about twenty minutes
	$(BIN)/python -m pytest tests/cluster

# the tests that depend most on versions: training, ranks that fail, rank groups, simulated GPUs
OLD_TESTS = tests/device tests/strategy tests/federation/test_failures.py tests/federation/test_rank_groups.py
test-oldest: OLDEST ?= $(VENV)-oldest
test-oldest:  ## run fast tests, and those of ranks and devices, with the lower bounds of all packages: several GB, 20 minutes
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet -c tests/oldest.txt -e '.[test,faiss,wandb,models,privacy,report,search,completion,cuhk03,onnx,tensorboard]'
	$(OLDEST)/bin/python -m $(PYTEST) -m "not slow and not dist and not others"
	$(OLDEST)/bin/python -m $(PYTEST) -m "(slow or dist) and not others and not cluster" $(OLD_TESTS)

test-fast: JOBS = 2
test-fast: $(STAMP)  ## run the tests that take less than a minute together, in two processes
	$(BIN)/python -m $(PYTEST) -m "not slow and not dist and not others"

durations: JOBS = 2
durations: $(STAMP)  ## measure which test functions are slow, and write tests/durations.json (a failing test is no obstacle)
	$(BIN)/python -m $(PYTEST) -m "not others and not cluster" --write-durations || test $$? -eq 1

rows: $(STAMP)  ## write the table of all settings, and the rows of all papers, after a change of a setting, a default or a row
	PYTHONPATH=src:tests $(BIN)/python tests/write_settings.py
	PYTHONPATH=src:tests $(BIN)/python tests/write_rows.py

coverage: $(STAMP)  ## run the tests of `make test`, and say which lines and branches of src none of them runs
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m $(PYTEST) -m "not others and not cluster"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

acceptance: $(STAMP)  ## try what README and docs promise, on a machine with GPUs: about 15 minutes
	$(BIN)/python benchmarks/acceptance.py

check: $(STAMP)  ## lint, names, types, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/plain_names.py src/fedsim benchmarks
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: export NO_MKDOCS_2_WARNING = 1 # a notice about other projects, in every build
docs: $(STAMP)  ## build the site of the documentation, and check its links
	$(BIN)/python -m mkdocs build --strict
	@echo "the site is build/docs/index.html; its search needs a server: $(BIN)/python -m http.server -d build/docs"

release: $(STAMP)  ## build sdist and wheel in dist, and try the wheel in a new environment: several GB, minutes
	rm -rf dist
	$(BIN)/python -m build
	.ci/try_wheel dist/*.whl $(PYTHON)

clean:  ## remove the environment and all caches, but no runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist src/*.egg-info
