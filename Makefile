# From a clean clone, with Python 3.11 and make: `make demo`. `make` alone lists the targets.

PYTHON ?= $(shell infra/find_python.sh)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := api,worker,functions,optimize,local,simulation,dev
# More workers than cores, as tests wait, slow ones most; those that share a stack or a model stay on one (tests/groups.py).
PYTEST_WORKERS ?= 3
SLOW_PYTEST_WORKERS ?= 4
PYTEST := $(BIN)/pytest -q --dist loadfile --no-loadscope-reorder --durations=10
SOURCES := api workers shared infra models bench examples tests tools
# Each has a pyproject.toml, a Makefile and tests of its own.
EMULATORS := emulators/bigquery emulators/pubsub
# Commands of `penstock` that serve nothing, each with a pyproject.toml and tests of its own.
TOOLS := tools/load tools/monitoring tools/planning
MEMBERS := $(EMULATORS) $(TOOLS)

# Skipped unless the extra `text` is installed, which happens after the other slow tests.
TEXT_TESTS := $(addprefix tests/workers/models/generation/test_,llama_cpp.py adapters.py gguf.py text_check.py) \
  $(addprefix tests/end_to_end/own_stack/test_,text_adapters.py engine_tenants.py)

# The tests alone start some hundred processes, each of which would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE
# Another project's packages may have the names of ours.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup text demo up example doctor bench bench-peers faults clients clients-lock test test-slow slow-unit test-emulators $(EMULATORS:=/test) check lint format types imports terraform-check deploy-check unit constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything pinned; again only when pyproject.toml or constraints.txt change

text: $(STAMP) ## add a small model that writes text, which `make demo` then shows
	@infra/install_locked.sh $(VENV) text

demo: $(STAMP) ## start the whole pipeline, send real input, show what came of it, stop; PROMPT="a green star": draws that; BROKER=rabbitmq: over RabbitMQ
	@$(BIN)/penstock demo $(if $(BROKER),--broker $(BROKER)) $(if $(PROMPT),--prompt "$(PROMPT)") $(if $(EDIT_PROMPT),--edit-prompt "$(EDIT_PROMPT)")

up: $(STAMP) ## start the whole pipeline and keep it up; BROKER=rabbitmq: over RabbitMQ; ARGS="--host 0.0.0.0": options of penstock up
	@$(BIN)/penstock up $(if $(BROKER),--broker $(BROKER)) $(ARGS)

example: $(STAMP) ## set up a model of examples/ with real weights, serve it and call it; NAME=upscale, labels, safety, transcribe, speech or ocr; FILE=cat.jpg; ONCE=1: then stop
	@$(BIN)/python -m examples.show $(NAME) $(if $(FILE),--file "$(FILE)") $(if $(ONCE),--once)

doctor: $(STAMP) ## say what is missing on this machine, and how to fix it
	@$(BIN)/penstock doctor

bench: $(STAMP) ## list the benchmarks; NAMES="soak rows": run these on this machine
	@$(BIN)/python -m bench $(NAMES)

bench-peers: $(STAMP) ## measure it beside other servers of the same model: QUICK=1: less, about 11 minutes on two cores
	@$(BIN)/python -m bench.peers $(if $(QUICK),--quick)

faults: $(STAMP) ## break the pipeline 66 times under traffic, and count what was lost: about 8 minutes; DELAY_MS=25: a broker that is far
	@$(BIN)/python -m tests.faults $(if $(DELAY_MS),--broker-delay-ms $(DELAY_MS))

clients: $(STAMP) ## run real clients of OpenAI and Replicate, LangChain and others; what they need goes into var/
	@$(BIN)/python -m tests.clients
	@$(BIN)/python -m tests.clients.go_suite

clients-lock: $(STAMP) ## write anew what is pinned for them
	@$(BIN)/python -m tests.clients --lock

test: lint ## what every change is tried with: the checks that run nothing, and the quick tests beside them
	@$(MAKE) --no-print-directory --jobs=2 unit types imports

test-emulators: $(EMULATORS:=/test) ## types and suites of the embedded Pub/Sub and BigQuery

# Their output comes at the end: other tests run beside them.
$(EMULATORS:=/test): $(STAMP)
	$(call timed,$(@D),out=$$($(MAKE) --no-print-directory -C $(@D) types unit BIN="$(CURDIR)/$(BIN)" 2>&1); status=$$?; echo "$$out"; (exit $$status))

# What takes longest first, and the emulators one after the other beside it.
test-slow: $(STAMP) ## the other tests: whole stacks, kills, fuzz, oracles, real models, outside tools, both emulators
	@$(MAKE) --no-print-directory --jobs=2 slow-unit terraform-check $(EMULATORS:=/test)

# Property tests stand in `make test` with few examples; here they get many.
slow-unit: $(STAMP)
	$(call timed,pytest of slow tests,$(PYTEST) -n $(SLOW_PYTEST_WORKERS) -m "slow or hypothesis" --hypothesis-profile=many --durations=40)
	@$(MAKE) --no-print-directory text
	$(call timed,pytest of text engines,$(PYTEST) -n $(PYTEST_WORKERS) -m slow $(TEXT_TESTS))

check: lint types imports ## the checks that run nothing

lint: $(STAMP) ## ruff: rules and format; codespell: American spelling; plain English
	$(call timed,ruff check,$(BIN)/ruff check)
	$(call timed,ruff format,$(BIN)/ruff format --check)
	$(call timed,codespell,$(BIN)/python -m tests.source_files | xargs -0 $(BIN)/codespell)
	$(call timed,plain English,$(BIN)/python -m tests.english --check)

format: $(STAMP) ## ruff: fix what it can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(STAMP) ## mypy --strict; the emulators have their own, before their tests
	$(call timed,mypy,$(BIN)/mypy $(SOURCES))

imports: $(STAMP) ## who may import whom
	$(call timed,lint-imports,$(BIN)/lint-imports)
	@$(MAKE) --no-print-directory -C emulators/bigquery imports BIN="$(CURDIR)/$(BIN)"
	@$(MAKE) --no-print-directory -C emulators/pubsub imports BIN="$(CURDIR)/$(BIN)"
	@for tool in $(TOOLS); do $(BIN)/lint-imports --config "$$tool/pyproject.toml" || exit 1; done

terraform-check: ## fmt, validate and test of infra/terraform, where terraform is there
	$(call timed,terraform-check,infra/terraform/check.sh)

deploy-check: $(STAMP) ## schemas and policies of manifests and Terraform, installs of the images; what it needs goes into var/
	$(call timed,manifests and Terraform,infra/kubernetes/check.sh)
	$(call timed,images,PYTHON="$(PYTHON)" infra/docker/check.sh)

unit: $(STAMP) ## pytest without the slow tests
	$(call timed,pytest of quick tests,$(PYTEST) -n $(PYTEST_WORKERS) -m "not slow")

constraints: ## write constraints.txt again for pyproject.toml, with hashes, and look for wheels; UPGRADE=1: with the newest versions
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@test -x $(BIN)/uv || { "$(PYTHON)" infra/lock.py only uv > $(VENV)/uv.txt && \
	  $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement $(VENV)/uv.txt; }
	@$(BIN)/uv pip compile --quiet $(if $(UPGRADE),--upgrade) --all-extras --universal --generate-hashes \
	  --no-emit-index-url --no-annotate --custom-compile-command "make constraints" \
	  --no-emit-package penstock $(foreach name,bigquery-emulator load monitoring planning pubsub-emulator,--no-emit-package penstock-$(name)) \
	  --output-file constraints.txt pyproject.toml $(MEMBERS:=/pyproject.toml)
	@echo vllm==0.32.0 | $(BIN)/uv pip compile --quiet $(if $(UPGRADE),--upgrade) --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_36 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command "make constraints" --output-file infra/docker/vllm.txt -
	@infra/check_wheels.sh $(BIN)/uv

clean: ## remove what the stack left in var/ and what the tools cached; .venv stays
	rm -rf var $(foreach folder,. $(EMULATORS),$(addprefix $(folder)/,.mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache))
	find $(SOURCES) emulators -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml $(MEMBERS:=/pyproject.toml) constraints.txt infra/setup.sh infra/step.sh infra/install_locked.sh infra/install_torch.sh infra/relative_paths.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; name one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@infra/setup.sh "$(PYTHON)" $(EXTRAS)
	@touch $(STAMP)

# Runs $(2) under the title $(1) and says how long it took.
define timed
@began=$$(date +%s); echo "== $(1)"; $(2); status=$$?; \
  echo "== $(1): $$(($$(date +%s) - began)) s"; exit $$status
endef
