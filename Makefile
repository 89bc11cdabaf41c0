# Two commands do everything: `make train` and `make test`. Each makes .venv where it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test test-all browser test-newer-ray coverage lint docs bench curves build lock clean

train: $(STAMP)
	$(BIN)/qfleet train CartPole-v1

# What a newcomer runs: everything but the tests marked slow. Meant to take under 6 minutes.
# Tests that start Ray clusters share one process (--dist loadgroup), which mostly waits, so that
# there are three for two cores (tests/conftest.py).
test: $(STAMP) browser
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow"

# The whole suite, as .ci/run runs it. Meant to take under 20 minutes.
test-all: $(STAMP) browser
	$(BIN)/python -m pytest -n 3 --dist loadgroup

# A browser for the tests of web pages, which skip without one. Without a network it gives up soon.
APT := timeout 300 env DEBIAN_FRONTEND=noninteractive \
    apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20
browser:
	@command -v chromium-headless-shell > /dev/null || command -v chromium > /dev/null || \
	    command -v google-chrome > /dev/null || \
	    { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && $(APT) update -qq < /dev/null && \
	    $(APT) install -y -qq --no-install-recommends chromium-headless-shell \
	    < /dev/null > /dev/null; } || \
	    echo "no browser can be installed here: tests of web pages are skipped"

# Smoke tests of the Ray engines with a Ray that is newer than the pinned one. Meant to take under
# 3 minutes. It lies in a folder of its own, and all other packages are those of .venv.
NEWER_RAY := 2.60.0
RAY_FOLDER := $(VENV)/ray-$(NEWER_RAY)
test-newer-ray: $(STAMP)
	test -d $(RAY_FOLDER) || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --target $(RAY_FOLDER) ray==$(NEWER_RAY) || rm -rf $(RAY_FOLDER)
	if test -d $(RAY_FOLDER); then export PYTHONPATH=$(CURDIR)/$(RAY_FOLDER); \
	    $(BIN)/python -c "import ray; assert ray.__version__ == '$(NEWER_RAY)', ray.__version__" && \
	    timeout 900 $(BIN)/python -m pytest -k "not make_a_curve" \
	    "tests/engines/cluster/test_ray_cluster.py::test_a_signal_leaves_nothing_behind[2]" \
	    tests/engines/parameter_server/test_server_in_flight.py tests/cli/test_cli_mapreduce.py \
	    tests/lab/test_mapreduce_ray.py::test_only_loopback_is_served \
	    tests/training/test_init_from.py::test_servers_and_actors_start_with_the_weights; \
	else echo "Ray $(NEWER_RAY) cannot be installed here: its smoke tests are left out"; fi

# The whole suite in one process, counting which lines ran.
coverage: $(STAMP)
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation as a web site in site/; a link to nowhere is an error.
docs: $(STAMP)
	$(BIN)/mkdocs build --quiet

# Side by side with Stable-Baselines3, in one process; prints ratios.
bench: $(STAMP)
	$(BIN)/python benchmarks/against_sb3.py

# The learning curves of docs/algorithms/ (an hour on two slow cores).
curves: $(STAMP)
	$(BIN)/python benchmarks/algorithm_curves.py

build: $(STAMP)
	$(BIN)/python -m build

# pip and not another installer: the pins say exactly which builds are meant.
$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(BIN)/python -m compileall -q qfleet  # tests start many processes, also where Python may not write
	touch $(STAMP)

# New pins: edit pyproject.toml, then `make lock` in a scratch environment.
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet torch==2.13.0
	.venv-lock/bin/python -m pip install --quiet --editable '.[dev,render,bench]'
	.venv-lock/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > requirements.lock
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
