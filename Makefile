# The environment, the model and the logs live in $XDG_CACHE_HOME/sglang-triattn (~/.cache by default), never here.
PYTHON ?= python3
PORT ?= 30000
ARGS ?=

export HF_HUB_OFFLINE := 1
# First step of every target: the environment's python, prepared if need be.
ENV = py="$$($(PYTHON) tools/env.py)"

.PHONY: setup model demo serve test lint python help
.DEFAULT_GOAL := setup

setup:  ## prepare the environment (the default target)
	@$(ENV)

model: ## prepare the demonstration model and its statistics; print both paths
	@$(ENV) && "$$py" tools/prepare_model.py

demo: ## serve the model, send requests that outgrow the budget, show what was evicted and freed
	@$(ENV) && "$$py" tools/demo.py

serve: ## serve the model on PORT=30000; ARGS="..." are more launch_server options
	@$(ENV) && "$$py" tools/serve.py --port $(PORT) $(ARGS)

# -P: the folders of the checkout must not shadow the packages `kernels` and `tests`.
test: lint ## lint, then pytest; ARGS="..." are more pytest options
	@$(ENV) && "$$py" -P -m pytest $(ARGS)

lint: ## ruff check and ruff format --check
	@$(ENV) && "$$py" -m ruff check . && "$$py" -m ruff format --check .

python: ## print the path of the environment's python
	@$(ENV) && echo "$$py"

help: ## list the targets
	@sed -n 's/^\([a-z]*\): *[a-z]* *## */\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10
