# Start with `make demo` and `make test`; `make help` lists all commands.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv has its own environment: the project's contains exactly the packages of requirements.lock.
TOOLS := .venv-tools
STAMP := $(VENV)/.installed
# Packages of your own, which `make setup` installs beside the locked ones; not in git.
LOCAL := requirements-local.txt
# So has every reward worker, in workers/NAME with a lock.
NAME ?= template
PORT ?= 8765
WORKER := .venv-workers/$(NAME)
# And the peers that benchmarks compare with.
BENCH := .venv-bench

.PHONY: help setup demo repro retrain test test-slow test-kill lint format docs lock audit sbom sign verify ui sync viz clean
.PHONY: quantised test-quantised worker bench gpu-check upgrade schedule-systemd

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Install requirements.lock, and your own requirements-local.txt, into .venv (needs Python 3.11 or newer)

$(STAMP): requirements.lock pyproject.toml $(wildcard $(LOCAL))
	@echo "Setting up $(VENV) (about a minute with a fast network)"
	@python=$$(for p in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	    if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$p"; break; fi; done); \
	if [ -z "$$python" ]; then \
	    echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)." \
	        "Name one with: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	[ -x $(TOOLS)/bin/uv ] || { "$$python" -m venv $(TOOLS); $(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv; }; \
	[ -x $(BIN)/python ] || $(TOOLS)/bin/uv venv --quiet --python "$$(command -v "$$python")" $(VENV)
	@$(TOOLS)/bin/uv pip sync --quiet --compile-bytecode --require-hashes --python $(BIN)/python requirements.lock
	@$(TOOLS)/bin/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@[ ! -f $(LOCAL) ] || $(TOOLS)/bin/uv pip install --quiet --python $(BIN)/python --constraint requirements.lock --requirement $(LOCAL)
	@touch $@

demo: setup  ## Run all pipelines on the small model: draw data, pretrain, baseline, train, evaluate
	@start=$$SECONDS; $(BIN)/kedro run; s=$$((SECONDS - start)); \
	echo "The whole run took $$((s / 60)) min $$((s % 60)) s."

repro: setup  ## Run the pipelines with DVC: only stages that changed since the last run; ENV=NAME for another environment
	@$(BIN)/python -m visual_grpo.retraining.project $(if $(ENV),--env=$(ENV))
	@$(BIN)/dvc repro $(if $(ENV),conf/$(ENV)/dvc.yaml,dvc.yaml)

quantised: $(VENV)/.quantised  ## Add bitsandbytes to .venv: model.base_weights=8bit or 4bit, grpo.optimizer=adamw_8bit

$(VENV)/.quantised: quantised.lock $(STAMP)
	@$(TOOLS)/bin/uv pip install --quiet --compile-bytecode --require-hashes --no-deps --python $(BIN)/python --requirement $<
	@touch $@

gpu-check: setup  ## Take a few steps on the GPU and hold them against the plan (ENV=NAME: another environment)
	@$(BIN)/kedro run --pipeline=gpu_check $(if $(ENV),--env=$(ENV))

retrain: setup  ## Retrain if there is a reason to, and promote what is better (ENV=NAME: another environment)
	@$(BIN)/python -m visual_grpo.retraining $(if $(ENV),--env=$(ENV))

test: setup  ## Run the tests, side by side on the cores that there are
	@$(BIN)/pytest --numprocesses=auto --maxprocesses=8

test-quantised: quantised  ## Run the tests that need bitsandbytes
	@$(BIN)/pytest --numprocesses=auto --maxprocesses=8 tests/quantised

test-slow: setup  ## Run only the slow tests (minutes)
	@$(BIN)/pytest -m slow

test-kill: setup  ## Kill trainings of every kind 10 times, and compare what they leave (an hour)
	@$(BIN)/pytest -m kill

lint: setup  ## Check style, types and import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup  ## Fix style with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup  ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html"

bench: $(BENCH)/.installed  ## Compare CPU time with other trainers, into bench/ (FLOW_GRPO=FOLDER: a checkout of flow_grpo)
	@$(BENCH)/bin/python benchmarks/against_trl.py --json bench/against_trl.json
	@$(if $(FLOW_GRPO),$(BENCH)/bin/python benchmarks/against_flow_grpo.py $(FLOW_GRPO) --json bench/against_flow_grpo.json)

$(BENCH)/.installed: benchmarks/requirements.lock | setup
	@[ -x $(BENCH)/bin/python ] || $(TOOLS)/bin/uv venv --quiet --python $(BIN)/python $(BENCH)
	@$(TOOLS)/bin/uv pip sync --quiet --compile-bytecode --require-hashes --python $(BENCH)/bin/python benchmarks/requirements.lock
	@$(TOOLS)/bin/uv pip install --quiet --python $(BENCH)/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

lock: setup  ## Update requirements.lock after a change in pyproject.toml
	@$(TOOLS)/bin/uv pip compile pyproject.toml --group dev --group docs --group dvc --group notebooks --group viz --group trackers \
	    --universal --generate-hashes --python-version 3.11 --output-file requirements.lock --quiet --no-header $(UPGRADE)
	@$(TOOLS)/bin/uv pip compile --group quantised --no-deps --constraint requirements.lock --universal --generate-hashes \
	    --python-version 3.11 --output-file quantised.lock --quiet --no-header $(UPGRADE)
	@$(TOOLS)/bin/uv pip compile pyproject.toml benchmarks/requirements.in --constraint requirements.lock --universal --generate-hashes \
	    --python-version 3.11 --output-file benchmarks/requirements.lock --quiet --no-header $(UPGRADE)
	@for folder in workers/*/; do $(TOOLS)/bin/uv pip compile $${folder}requirements.in --universal --generate-hashes \
	    --python-version 3.11 --output-file $${folder}requirements.lock --quiet --no-header $(UPGRADE); done
	@touch $(STAMP)

upgrade: setup  ## Raise the locked versions as far as pyproject.toml allows, install them, and list what changed
	@$(MAKE) --no-print-directory lock UPGRADE=--upgrade
	@rm $(STAMP)
	@$(MAKE) --no-print-directory setup
	@git show HEAD:requirements.lock | $(BIN)/python .ci/lock_changes.py /dev/stdin requirements.lock

audit: setup  ## Look up known vulnerabilities of the locked packages (needs the network)
	@$(TOOLS)/bin/uv tool run --quiet pip-audit --requirement requirements.lock --requirement quantised.lock --disable-pip --require-hashes

sbom: setup  ## Write sbom.json, the list of the locked packages in CycloneDX's format
	@$(TOOLS)/bin/uv tool run --quiet --from cyclonedx-bom cyclonedx-py requirements --outfile sbom.json requirements.lock
	@echo "Wrote sbom.json"

sign:  ## Sign adapters with your own key: make sign FOLDER=data/06_models/adapters KEY=key.pem
	@cd $(FOLDER) && find . -type f ! -name 'SHA256SUMS*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum > SHA256SUMS
	@openssl dgst -sha256 -sign $(KEY) -out $(FOLDER)/SHA256SUMS.sig $(FOLDER)/SHA256SUMS
	@echo "Signed: $(FOLDER)/SHA256SUMS.sig"

verify:  ## Verify signed adapters: make verify FOLDER=data/06_models/adapters KEY=public.pem
	@openssl dgst -sha256 -verify $(KEY) -signature $(FOLDER)/SHA256SUMS.sig $(FOLDER)/SHA256SUMS
	@cd $(FOLDER) && sha256sum --quiet --strict --check SHA256SUMS && \
	    diff <(cut -c67- SHA256SUMS) <(find . -type f ! -name 'SHA256SUMS*' | LC_ALL=C sort)

ui: setup  ## Show the runs in MLflow's web interface, best result first
	@echo 'Runs, best result first: http://127.0.0.1:5000/#/experiments/1/runs?orderByKey=metrics.%60result%2Fgain%60&orderByAsc=false'
	@$(BIN)/mlflow ui --backend-store-uri sqlite:///$(CURDIR)/mlflow.db

sync: setup  ## Add to MLflow what it lacks of the results in data
	@$(BIN)/python -m visual_grpo.tracking.sync

viz: setup  ## Show the pipelines in Kedro-Viz
	@$(BIN)/kedro viz run

worker: $(WORKER)/.installed  ## Start a reward worker in its own environment: NAME=hpsv3, PORT=8765 (docs/reward_workers.md)
	@PYTHONPATH=workers exec $(WORKER)/bin/python workers/$(NAME)/worker.py --port=$(PORT) $(ARGS)

# An edit of requirements.in is locked before it is installed.
workers/$(NAME)/requirements.lock: workers/$(NAME)/requirements.in | setup
	@$(TOOLS)/bin/uv pip compile $< --universal --generate-hashes --python-version 3.11 --output-file $@ --quiet --no-header
	@touch $@

$(WORKER)/.installed: workers/$(NAME)/requirements.lock | setup
	@[ -x $(WORKER)/bin/python ] || $(TOOLS)/bin/uv venv --quiet --python $(BIN)/python $(WORKER)
	@$(TOOLS)/bin/uv pip sync --quiet --require-hashes --python $(WORKER)/bin/python $<
	@touch $@

schedule-systemd: setup  ## Write systemd units that retrain every week, as your user, into ~/.config/systemd/user
	@units="$${XDG_CONFIG_HOME:-$$HOME/.config}/systemd/user"; mkdir -p "$$units"; \
	for unit in service timer; do \
	    sed 's|/path/to/visual-grpo|$(CURDIR)|g' "schedules/systemd/visual-grpo-retrain.$$unit" > "$$units/visual-grpo-retrain.$$unit"; done; \
	echo "Wrote the units into $$units. Start: systemctl --user daemon-reload && systemctl --user enable --now visual-grpo-retrain.timer"

clean:  ## Remove outputs of runs (data, MLflow runs, caches), but not .venv nor your own folders in data/01_raw
	@rm -rf data/01_raw/shapes data/01_raw/words data/01_raw/scenes
	@find data -mindepth 2 -not -path 'data/01_raw/*' -not -name .gitkeep -not -name '*.dvc' -delete 2>/dev/null || true
	@rm -rf mlflow.db* mlartifacts .viz .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
