# The environments, the models and the logs live in $XDG_CACHE_HOME/sglang-triattn (~/.cache by default), never here.
PYTHON ?= python3
PORT ?= 30000
# One that tools/prepare_model.py knows. Not ?=: other programs use a variable of that name.
MODEL = smollm2-135m
ARGS ?=

export HF_HUB_OFFLINE := 1
# Where it is set, each process of every server compiles this project's modules again: a fifth of a start.
unexport PYTHONDONTWRITEBYTECODE
# First step of nearly every target: the python of this checkout's environment, prepared if need be.
ENV = py="$$($(PYTHON) tools/env.py)"

.PHONY: setup model quality-model demo serve check test test-all test-wide test-for soak-properties conformance kernels \
	upstream dist lint ruff types python help
.DEFAULT_GOAL := setup

setup:  ## prepare the environment (the default target)
	@$(ENV)

.PHONY: clean-envs
# With no environment, which would be prepared first.
clean-envs: ## remove environments not used for 30 days, interrupted installs and those of checkouts that are gone
	@$(PYTHON) tools/clean_envs.py

model: ## prepare the demonstration model, or MODEL=..., and its statistics; print both paths
	@$(ENV) && "$$py" tools/prepare_model.py --model $(MODEL)

quality-model: ## prepare the model of the quality benchmark and its statistics; print both paths
	@$(MAKE) --no-print-directory model MODEL=qwen2.5-coder-0.5b

demo: ## serve the model, send requests that outgrow the budget, show what was evicted and freed
	@$(ENV) && "$$py" tools/demo.py --model $(MODEL)

serve: ## serve the model on PORT=30000; ARGS="..." are more launch_server options
	@$(ENV) && "$$py" tools/serve_model.py --model $(MODEL) --port $(PORT) $(ARGS)

check: ruff ## ruff, then side by side the type checker and the short tests of tests/unit: within a minute
	@$(ENV) && { $(MAKE) --no-print-directory types & types=$$!; \
	OMP_NUM_THREADS=1 "$$py" -P -m pytest -n 2 --dist loadfile -q --durations 0 --durations-min 3 tests/unit $(ARGS); \
	tests=$$?; wait $$types && exit $$tests; }

# -P: the folders of the checkout must not shadow the packages `kernels` and `tests`. Two processes: each keeps up to four
# servers of 1.3 GB. A file stays in one process, because its tests share servers; tests/conftest.py orders the files.
# One thread for each process: threads that wait for one another spin, and where more of them run than there are cores
# everything is many times slower.
PYTEST = OMP_NUM_THREADS=1 "$$py" -P -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Compiles kernels, then runs tests that report it.
TEST = $(ENV) && summary="$$(mktemp)" && "$$py" tools/compile_kernels.py $(COMPILED) --summary "$$summary" && \
	kernels="$$(cat "$$summary")" && rm "$$summary" && $(PYTEST) --kernels "$$kernels"

test: COMPILED = --architectures 90
test: lint ## lint, compile the kernels for sm_90, then every test that is not marked wide; ARGS="..." are more pytest options
	@$(TEST) -m "not wide" $(ARGS)

test-all: lint ## lint, compile the kernels, then every test, those marked wide included
	@$(TEST) $(ARGS)

test-wide: ## compile the kernels, then only the tests marked wide; PART=0 to 5 takes a sixth of both
	@$(ENV) && "$$py" tools/compile_kernels.py $(if $(PART),--part $(PART)) && $(PYTEST) -m wide $(if $(PART),--part $(PART)) $(ARGS)

test-for: ## only the tests that a change can break: of FILES="a.py b.py", else of what differs from HEAD or BASE=...
	@$(ENV) && chosen="$$("$$py" tools/tests_for.py $(if $(BASE),--base $(BASE)) $(FILES))" && printf '%s\n' "$$chosen" && \
	files="$$(printf '%s\n' "$$chosen" | cut -f 1)" && { [ -z "$$files" ] || \
	$(PYTEST) $(ARGS) $$files; }

soak-properties: ## random histories under random settings for STEPS=100000 steps, from SEED=1 on
	@$(ENV) && OMP_NUM_THREADS=1 "$$py" -P -m pytest -q --timeout 0 --show-capture=no -W ignore tests/property/soak.py

conformance: ## run SGLang's own tests against three servers: plain, budget never reached, small budget
	@$(ENV) && OMP_NUM_THREADS=1 "$$py" -m benchmarks.conformance $(ARGS)

kernels: ## compile every kernel for sm_80, sm_90 and sm_100; print registers, spills and shared memory
	@$(ENV) && "$$py" tools/compile_kernels.py

upstream: ## say what the newest SGLang, or VERSION=..., would break
	@$(ENV) && "$$py" tools/upstream.py $(if $(VERSION),--version $(VERSION))

dist: ## build the sdist and the wheel of the last commit into dist/, and check them
	@$(ENV) && "$$py" tools/build_dist.py

lint: ruff types ## ruff and the type checker

ruff: ## ruff check and ruff format --check
	@$(ENV) && "$$py" -m ruff check . && "$$py" -m ruff format --check .

types: ## basedpyright on everything but tests and benchmarks
	@$(ENV) && "$$py" -m basedpyright --pythonpath "$$py"

python: ## print the path of this checkout's python
	@$(ENV) && echo "$$py"

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[a-z ]*## */\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18
