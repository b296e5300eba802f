# Start with `make demo` and `make test`; `make help` lists all commands.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv is in a separate environment, so that the project's has exactly the packages of requirements.lock.
TOOLS := .venv-tools
# The tools that audit the locks have a separate environment, too.
AUDIT := .venv-audit
LOCKS := requirements.lock quantised.lock tools.lock audit.lock benchmarks/requirements.lock $(wildcard workers/*/requirements.lock)
STAMP := $(VENV)/.installed
# The code that the environment runs: of another folder, if it was copied or moved.
CODE := $(shell cat $(VENV)/lib/python3*/site-packages/_editable_impl_visual_grpo.pth 2>/dev/null)
# Your packages, which `make setup` installs in addition to the locked ones; not in git.
LOCAL := requirements-local.txt
# Each reward worker has a lock file in workers/NAME and a separate environment.
# Of the command line alone: shells and WSL set variables of these names, too.
ENV :=
NAME := template
PORT := 8765
WORKER := .venv-workers/$(NAME)
# The libraries that benchmarks compare with.
BENCH := .venv-bench

.PHONY: help setup demo repro retrain test test-slow test-kill lint format docs lock audit sbom sign verify ui sync viz clean
.PHONY: quantised test-quantised house base worker install-worker bench gpu-check gpu-kit gpu-bench upgrade schedule-systemd

##@ Start

help:  ## Show this list
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## Install requirements.lock and requirements-local.txt

ifneq ($(CODE),$(CURDIR)/src)
.PHONY: $(STAMP) $(BENCH)/.installed
FOREIGN := $(if $(CODE),rm -rf $(VENV) $(BENCH))
endif

$(STAMP): requirements.lock tools.lock pyproject.toml $(wildcard $(LOCAL))
	@echo "Setting up $(VENV) (about a minute with a fast network)"
	@$(FOREIGN)
	@python=$$(for p in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	    if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$p"; break; fi; done); \
	if [ -z "$$python" ]; then \
	    echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)." \
	        "Name one with: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	[ $(TOOLS)/.installed -nt tools.lock ] || { "$$python" -m venv $(TOOLS); \
	    $(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement tools.lock; touch $(TOOLS)/.installed; }; \
	[ -x $(BIN)/python ] || $(TOOLS)/bin/uv venv --quiet --python "$$(command -v "$$python")" $(VENV)
	@$(TOOLS)/bin/uv pip sync --quiet --compile-bytecode --require-hashes --python $(BIN)/python requirements.lock
	@# MLflow does not escape a % in the path of its own files.
	@[[ "$$PWD" != *%* ]] || sed -i 's/("script_location", final_alembic_dir)$$/("script_location", final_alembic_dir.replace("%", "%%"))/' \
	    $(VENV)/lib/python3*/site-packages/mlflow/store/db/utils.py
	@$(TOOLS)/bin/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@[ ! -f $(LOCAL) ] || $(TOOLS)/bin/uv pip install --quiet --python $(BIN)/python --constraint requirements.lock --requirement $(LOCAL)
	@touch $@

demo: setup  ## Run all pipelines on the small model
	@start=$$SECONDS; $(BIN)/kedro run; s=$$((SECONDS - start)); \
	echo "The whole run took $$((s / 60)) min $$((s % 60)) s."

# At 127.0.0.1 MLflow opens its assistant over a third of the page; at another name of this machine it does not.
ui: PORT := 5000
ui: setup  ## Show the runs in MLflow, best result first; PORT=5000
	@store=$${MLFLOW_TRACKING_URI:-sqlite:///mlflow.db}; \
	if [[ $$store != http* ]] && (exec 3<>/dev/tcp/127.0.0.1/$(PORT)) 2>/dev/null; then \
	    echo "Port $(PORT) is taken, perhaps by another make ui. Name a free one: make ui PORT=$$(($(PORT) + 1))" >&2; exit 1; fi; \
	page="/#/experiments/$$($(BIN)/python -m visual_grpo.tracking.mlflow_api)/runs?workflowType=machine_learning&viewStateShareKey=gain"; \
	if [[ $$store == http* ]]; then echo "The server of MLFLOW_TRACKING_URI shows the runs: $$(sed -E "s|//[^/@]*@|//|" <<<"$$store")$$page"; exit; fi; \
	echo "Runs, best result first: http://mlflow.localhost:$(PORT)$$page"; \
	echo "(If the browser does not know that name, 127.0.0.1 in its place.)"; \
	MLFLOW_BACKEND_STORE_URI="$$store" MLFLOW_SERVER_ALLOWED_HOSTS="localhost:*,127.0.0.1:*,mlflow.localhost:*" \
	MLFLOW_SERVER_CORS_ALLOWED_ORIGINS="http://mlflow.localhost:$(PORT)" MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/python -m mlflow ui --port $(PORT) \
	    >mlflow-ui.log 2>&1 || { tail -n 3 mlflow-ui.log; exit 1; }

clean:  ## Remove outputs of runs and unpacked zips, keep your data
	@shopt -s nullglob; for made in data/01_raw/*/starter.json; do rm -rf "$${made%/*}"; done
	@# A folder of results may be a link to a larger disk: the link stays, what is behind it goes.
	@shopt -s nullglob; for folder in data/*/0[2-9]_*/ data/0[2-9]_*/ data/; do \
	    find "$$folder" -mindepth 1 -path 'data/*/*' -not -path 'data/01_raw/*' -not -path '*/01_raw/votes/*' -not -name .gitkeep \
	        -not -name '*.dvc' \( -not -xtype d -o -type d -empty \) -delete; done
	@rm -rf mlflow.db* mlflow-ui.log mlartifacts .viz .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@[ ! -x $(BIN)/python ] || $(BIN)/python -m visual_grpo.data.archives

##@ Run

repro: setup  ## Run the DVC stages whose inputs changed; ENV=NAME
	@$(BIN)/python -m visual_grpo.operations.retraining.project $(if $(ENV),--env=$(ENV))
	@$(BIN)/dvc repro $(if $(ENV),conf/$(ENV)/dvc.yaml,dvc.yaml)

retrain: setup  ## Retrain if inputs changed, promote if better; ENV=NAME
	@$(BIN)/python -m visual_grpo.operations.retraining $(if $(ENV),--env=$(ENV))

sync: setup  ## Add missing results in data/ to MLflow
	@$(BIN)/python -m visual_grpo.tracking.sync

gpu-check: setup  ## Run steps on the GPU, compare with the plan; ENV=NAME
	@$(BIN)/kedro run --pipeline=gpu_check $(if $(ENV),--env=$(ENV))

worker: $(WORKER)/.installed  ## Start a reward worker; NAME=hpsv3, PORT=8765
	@PYTHONPATH=workers exec $(WORKER)/bin/python workers/$(NAME)/worker.py --port=$(PORT) $(ARGS)

install-worker: $(WORKER)/.installed  ## Install a reward worker; NAME=tesseract

# An edit of requirements.in is locked before it is installed.
workers/$(NAME)/requirements.lock: workers/$(NAME)/requirements.in | setup
	@$(TOOLS)/bin/uv pip compile $< --universal --generate-hashes --python-version 3.11 --output-file $@ --quiet --no-header
	@touch $@

$(WORKER)/.installed: workers/$(NAME)/requirements.lock | setup
	@[ -x $(WORKER)/bin/python ] || $(TOOLS)/bin/uv venv --quiet --python $(BIN)/python $(WORKER)
	@$(TOOLS)/bin/uv pip sync --quiet --require-hashes --python $(WORKER)/bin/python $<
	@touch $@

viz: setup  ## Show the pipelines in Kedro-Viz
	@$(BIN)/kedro viz run

schedule-systemd: setup  ## Write systemd units that retrain every week
	@units="$${XDG_CONFIG_HOME:-$$HOME/.config}/systemd/user"; cd -P .; folder=$$PWD; \
	if [[ "$$folder" == *[[:cntrl:]=\"\\$$]* || "$$folder" == *[[:blank:]] ]]; then \
	    printf 'The path %q has a quote, a backslash, a $$, a =, a line break or a space at its end, which systemd or env would misread. Rename the folder.\n' \
	        "$$folder" >&2; exit 1; fi; \
	mkdir -p "$$units"; \
	for unit in visual-grpo-retrain.service visual-grpo-retrain.timer; do \
	    text=$$(<"schedules/systemd/$$unit"); \
	    printf '%s\n' "$${text//\/path\/to\/visual-grpo/"$${folder//%/%%}"}" > "$$units/$$unit"; done; \
	echo "Wrote the units into $$units. Start: systemctl --user daemon-reload && systemctl --user enable --now visual-grpo-retrain.timer"

##@ Adapters

# Works without an environment, with any Python and openssl.
# These may name strangers' folders: neither make nor the shell expands them.
override FOLDER := $(value FOLDER)
override KEY := $(value KEY)
export FOLDER KEY
sign verify: SIGNATURE = $(or $(wildcard $(BIN)/python),$(PYTHON)) src/visual_grpo/operations/signature.py $@ $(if $(FOLDER),"$$FOLDER") $(if $(KEY),"$$KEY")
sign:  ## Sign adapters; FOLDER=..., KEY=key.pem
	@$(SIGNATURE)

verify:  ## Verify signed adapters; FOLDER=..., KEY=public.pem
	@$(SIGNATURE)

##@ Packages

quantised: $(VENV)/.quantised  ## Add bitsandbytes, for 8-bit and 4-bit weights

$(VENV)/.quantised: quantised.lock $(STAMP)
	@$(TOOLS)/bin/uv pip install --quiet --compile-bytecode --require-hashes --no-deps --python $(BIN)/python --requirement $<
	@touch $@

lock: setup  ## Update the lock files after a change of pyproject.toml
	@for group in tools audit; do $(TOOLS)/bin/uv pip compile --group $$group --universal --generate-hashes \
	    --python-version 3.11 --output-file $$group.lock --quiet --no-header $(UPGRADE); done
	@$(TOOLS)/bin/uv pip compile pyproject.toml --group dev --group docs --group dvc --group notebooks --group viz --group trackers \
	    --universal --generate-hashes --python-version 3.11 --output-file requirements.lock --quiet --no-header $(UPGRADE)
	@$(TOOLS)/bin/uv pip compile --group quantised --no-deps --constraint requirements.lock --universal --generate-hashes \
	    --python-version 3.11 --output-file quantised.lock --quiet --no-header $(UPGRADE)
	@$(TOOLS)/bin/uv pip compile pyproject.toml benchmarks/requirements.in --constraint requirements.lock --universal --generate-hashes \
	    --python-version 3.11 --output-file benchmarks/requirements.lock --quiet --no-header $(UPGRADE)
	@for folder in workers/*/; do $(TOOLS)/bin/uv pip compile $${folder}requirements.in --universal --generate-hashes \
	    --python-version 3.11 --output-file $${folder}requirements.lock --quiet --no-header $(UPGRADE); done
	@touch $(STAMP)

upgrade: setup  ## Raise the locked versions and list the changes
	@$(MAKE) --no-print-directory lock UPGRADE=--upgrade
	@rm $(STAMP)
	@$(MAKE) --no-print-directory setup
	@git show HEAD:requirements.lock | $(BIN)/python .ci/lock_changes.py /dev/stdin requirements.lock
	@echo "If MLflow then calls its database out of date: $(BIN)/python -m mlflow db upgrade sqlite:///mlflow.db"

# Each lock describes one environment, so versions of a package may differ between them.
audit: $(AUDIT)/.installed  ## Look up known vulnerabilities of all locked packages
	@bad=; for lock in $(LOCKS); do echo "$$lock:"; \
	    $(AUDIT)/bin/pip-audit --requirement $$lock --disable-pip --require-hashes || bad="$$bad $$lock"; done; \
	[ -z "$$bad" ] || { echo "Not without known vulnerabilities:$$bad" >&2; exit 1; }

sbom: $(AUDIT)/.installed  ## Write sbom/, a CycloneDX package list for each lock file
	@mkdir -p sbom; for lock in $(LOCKS); do name=$${lock%.lock}; \
	    $(AUDIT)/bin/cyclonedx-py requirements -o "sbom/$${name//\//-}.json" $$lock; done
	@echo "Wrote sbom/"

$(AUDIT)/.installed: audit.lock | setup
	@[ -x $(AUDIT)/bin/python ] || $(TOOLS)/bin/uv venv --quiet --python $(BIN)/python $(AUDIT)
	@$(TOOLS)/bin/uv pip sync --quiet --require-hashes --python $(AUDIT)/bin/python $<
	@touch $@

##@ Develop

lint: setup  ## Check style, types and import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup  ## Fix style with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# In the order of the files: xdist would run those with few but long tests last, one after the other.
# Where bitsandbytes has been added, its tests are test-quantised's all the same.
test: setup  ## Run the tests on all cores
	@# With bytecode, which some containers switch off: tests start many processes, and each would compile the sources.
	@# And with memory that glibc keeps: to give it back and take it anew costs a tenth of the time.
	@env -u PYTHONDONTWRITEBYTECODE MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=33554432 \
	    $(BIN)/pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder \
	    --ignore=tests/quantised

test-quantised: quantised  ## Run the tests that need bitsandbytes
	@$(BIN)/pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile tests/quantised

test-slow: setup  ## Run only the slow tests
	@$(BIN)/pytest -m slow

test-kill: setup  ## Kill trainings, resume and compare (an hour)
	@$(BIN)/pytest -m kill

# Where `make test` says that a shipped base is not that of the default recipe.
base: BASES := src/visual_grpo/starter/bases
base: setup  ## Pretrain the base model that the package ships
	@$(BIN)/kedro run --env=base --pipeline=starter --params=starter.pretrain=true
	@rm -rf $(BASES)/shapes_glm_image && cp -R data/06_models/base $(BASES)/shapes_glm_image

house: setup  ## Measure the code against its targets: one place for each thing, lines
	@$(BIN)/python .ci/house.py

docs: setup  ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html"

bench: $(BENCH)/.installed  ## Compare CPU time with TRL; FLOW_GRPO=FOLDER
	@$(BENCH)/bin/python benchmarks/against_trl.py --json bench/against_trl.json
	@$(if $(FLOW_GRPO),$(BENCH)/bin/python benchmarks/against_flow_grpo.py $(FLOW_GRPO) --json bench/against_flow_grpo.json)

gpu-kit: setup  ## Prepare .gpu, which gpu-bench needs on a bare machine
	@$(BIN)/python -W ignore benchmarks/gpu/prepare.py

# On a machine without an environment: with its own Python, and the wheels of gpu-kit.
gpu-bench:  ## Measure on a GPU, in two calls of 7 minutes: ARGS=first, ARGS=second
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -W ignore benchmarks/gpu/run.py $(ARGS)

$(BENCH)/.installed: benchmarks/requirements.lock | setup
	@[ -x $(BENCH)/bin/python ] || $(TOOLS)/bin/uv venv --quiet --python $(BIN)/python $(BENCH)
	@$(TOOLS)/bin/uv pip sync --quiet --compile-bytecode --require-hashes --python $(BENCH)/bin/python benchmarks/requirements.lock
	@$(TOOLS)/bin/uv pip install --quiet --python $(BENCH)/bin/python --no-deps --no-build-isolation --editable .
	@touch $@
