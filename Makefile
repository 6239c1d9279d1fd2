# `make demo` and `make test` are all the set-up there is: whatever they need, `scripts/setup` creates in .venv.
#
#   PYTHON=python3.12           the interpreter to make .venv from (default: the first of 3.11 to 3.14 that is found)
#   OSTRACA_TORCH=torch==2.6.0  the torch to install instead of the pinned one
#   PYTEST_JOBS=1               how many processes run tests at once (default: 4; 0: none but pytest's own, as -s and --pdb need)
#   DEMO_ARGS=, PYTEST_ARGS=, FUZZ_ARGS=, SOAK_ARGS=, SOAK_FLASH_ARGS=, SOAK_POD_ARGS=, SIMULATE_ARGS=, SOAK_SIM_ARGS=,
#   EXPLORE_ARGS=, SCALE_ARGS=, NVMEOF_ARGS=, KUBE_ARGS=, IMAGES_ARGS=, MUTANTS_ARGS=, BENCH_ARGS=, LOCK_ARGS=, STRUCTURE_ARGS=
#   are handed on
#
# The first two count when .venv is made; `make clean` first to change them later.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?=
OSTRACA_TORCH ?=
PYTEST_JOBS ?= 4
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest --numprocesses $(PYTEST_JOBS) --dist load --maxschedchunk 1
READY := .venv/.ready
READY_VLLM := .venv-vllm/.ready
READY_GPU := .venv-gpu/.ready
READY_LMCACHE := .venv-lmcache/.ready
READY_SGLANG := .venv-sglang/.ready
READY_DYNAMO := .venv-dynamo/.ready-dynamo
CODE := fabric dpu_agent enclosure sdk
NATIVE := $(wildcard fabric/ostraca_fabric/native/*.[ch] fabric/ostraca_fabric/native/io/*.[ch])

# Keeps the list of fonts that matplotlib makes in .venv, and out of the home directory.
export MPLCONFIGDIR ?= $(CURDIR)/.venv/matplotlib

# Tests start hundreds of processes: each would compile all modules again where the environment, as in many containers, says
# that none may be kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(READY) ## Two worker processes share a real model's KV cache through Ostraca
	@$(BIN)/python -m demo.run $(DEMO_ARGS)

.PHONY: test
test: $(READY) ## Run the whole test suite
	@$(PYTEST) $(PYTEST_ARGS)

.PHONY: test-vllm
test-vllm: $(READY_VLLM) ## Run the real vLLM engine on a CPU, in an environment of its own (3.5 GB)
	@.venv-vllm/bin/python -m pytest -m "vllm or not slow" tests/sdk/connectors/vllm tests/sdk/connectors/conformance $(PYTEST_ARGS)

.PHONY: test-lmcache
test-lmcache: $(READY_LMCACHE) ## Run LMCache's storage managers and benchmark on a CPU, in an environment of its own (1.8 GB)
	@LMCACHE_TRACK_USAGE=false .venv-lmcache/bin/python -m pytest -m lmcache \
	  tests/sdk/connectors/lmcache/test_adapter.py tests/sdk/connectors/lmcache/test_storage_plugin.py \
	  tests/sdk/connectors/conformance $(PYTEST_ARGS)

.PHONY: test-sglang
test-sglang: $(READY_SGLANG) ## Run SGLang's host pools and HiCache controller on a CPU, in an environment of its own (3 GB)
	@.venv-sglang/bin/python -m pytest tests/sdk/connectors/sglang/test_adapter.py $(PYTEST_ARGS)

# Dynamo's package brings plug-ins for pytest, which need its own tests.
.PHONY: test-dynamo
test-dynamo: $(READY_DYNAMO) ## Run Dynamo's router and vLLM workers on a CPU, in an environment of its own (4 GB)
	@.venv-dynamo/bin/python -m pytest $(addprefix -p no:,vllm_tests sglang_tests trtllm_tests triton_tests) \
	  tests/sdk/connectors/dynamo $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(READY_GPU) ## Run what needs a GPU, or its kernels in Triton's interpreter, in an environment of its own (1.8 GB)
	@.venv-gpu/bin/python -m pytest tests/sdk/memory/test_gpu_tags.py tests/sdk/memory/test_gpu_blocks.py \
	  tests/sdk/direct/test_gpu_reads.py tests/contract/devices $(PYTEST_ARGS)
	@.venv-gpu/bin/python -c 'import sys, torch; torch.cuda.is_available() or \
	  sys.exit("torch finds no GPU here: the skipped tests never ran, and the kernels ran in an interpreter only")'

.PHONY: structure
structure: $(READY) ## Measure structure and prose against their goals (STRUCTURE_ARGS: --check, --static, --get-path, --offenders)
	@$(BIN)/python -m scripts.structure $(STRUCTURE_ARGS)

.PHONY: check
check: $(READY) ## Everything CI asks for: format, lint, types, layers, structure, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.structure --static --check --offenders 5
	$(BIN)/python -m scripts.structure --get-path --offenders 0
	$(PYTEST) $(PYTEST_ARGS)

.PHONY: check-native
check-native: $(READY) ## The flash I/O engine under AddressSanitizer and ThreadSanitizer, by a C program; a minute
	$(PYTEST) tests/fabric/native

# What no shorter run needs comes with the first long one: atheris, 130 MB, for x86-64 alone. One heap for all
# threads: what several keep for themselves would look like memory that grows.
.PHONY: fuzz
fuzz: $(READY) ## A million wrong frames at decoders, agent and SDK (FUZZ_ARGS: --frames, --seconds, --seed, --target)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
	  $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps --require-hashes -r requirements-fuzz.lock || \
	  echo 'atheris could not be installed: going on without it'
	@MALLOC_ARENA_MAX=1 $(BIN)/python -m tests.scenarios.fuzz $(FUZZ_ARGS)

.PHONY: soak
soak: $(READY) ## Every cell of the fault matrix, interrupted workers, random faults under traffic (SOAK_ARGS: --minutes, --seed, --transport)
	@OSTRACA_EVERY_CELL=1 $(BIN)/python -m pytest tests/scenarios/fabric/faults/test_fault_matrix.py tests/scenarios/fabric/faults/test_wrong_way.py tests/admin/workflows/test_dying.py
	@$(BIN)/python -m tests.scenarios.interrupts
	@$(BIN)/python -m tests.scenarios.soak $(SOAK_ARGS)

.PHONY: soak-flash
soak-flash: $(READY) ## Kill a fabric on real files 200 times, and look for lost blocks (SOAK_FLASH_ARGS: --kills, --power-cut)
	@$(BIN)/python -m tests.scenarios.soak_flash $(SOAK_FLASH_ARGS)

.PHONY: soak-pod
soak-pod: $(READY) ## An hour of etcd, agents and workers that die and are cut off (SOAK_POD_ARGS: --minutes, --seed, --agents)
	@$(BIN)/python -m tests.scenarios.soak_pod $(SOAK_POD_ARGS)

.PHONY: test-nvmeof
test-nvmeof: $(READY) ## Real NVMe-oF over TCP and RDMA between two virtual machines; a quarter of an hour (NVMEOF_ARGS: --transport, --limit)
	@$(BIN)/python -m tests.scenarios.nvmeof $(NVMEOF_ARGS)

.PHONY: test-kube
test-kube: $(READY) ## The Helm chart on a real Kubernetes of several nodes; 20 minutes, the first time 30 (KUBE_ARGS: --scenario, --hold, --limit)
	@$(BIN)/python -m tests.kube $(KUBE_ARGS)

.PHONY: images
images: $(READY) ## Container images by docker, buildah or podman (IMAGES_ARGS: NAME, --engine, --base, --platform, --tag)
	@$(BIN)/python -m helm.images.engine $(IMAGES_ARGS)

.PHONY: simulate
simulate: $(READY) ## 10,000 histories of a shard on a simulated drive (SIMULATE_ARGS: --histories, --seed, --steps, --jobs)
	@$(BIN)/python -m tests.simulation $(SIMULATE_ARGS)

.PHONY: soak-sim
soak-sim: $(READY) ## 10,000 histories of a whole simulated fabric (SOAK_SIM_ARGS: --histories, --seed, --steps, --jobs)
	@$(BIN)/python -m tests.simulation.fabric $(SOAK_SIM_ARGS)

.PHONY: explore
explore: $(READY) ## Every order of events around a change of owner, at small scope (EXPLORE_ARGS: --deep)
	@$(BIN)/python -m tests.simulation.explore.explore $(EXPLORE_ARGS)

.PHONY: scale
scale: $(READY) ## The controllers of 64 agents with 1,152 drives (SCALE_ARGS: SCENARIO, --agents, --enclosures, --drives, --seed)
	@$(BIN)/python -m tests.simulation.scale $(SCALE_ARGS)

.PHONY: mutants
mutants: $(READY) ## Mistakes made on purpose, each of which some simulation must find (MUTANTS_ARGS: WORD, --jobs)
	@$(BIN)/python -m tests.simulation.mutants.mutants $(MUTANTS_ARGS)

.PHONY: bench
bench: $(READY) ## Measure against this machine's own limits
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

.PHONY: format
format: $(READY) ## Format the code and apply safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Hashes are the public index's: wheels that happen to lie on this machine must not find their way into the lock.
.PHONY: lock
lock: $(READY) ## Write the lock files anew (LOCK_ARGS=--upgrade for newer versions)
	@env -u UV_FIND_LINKS -u UV_INDEX -u UV_EXTRA_INDEX_URL \
	  $(BIN)/uv pip compile pyproject.toml --group dev --extra agent --extra enclosure --extra admin --extra demo \
	  --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --quiet --output-file requirements.lock $(LOCK_ARGS)
	@for extra in agent enclosure admin; do env -u UV_FIND_LINKS -u UV_INDEX -u UV_EXTRA_INDEX_URL \
	  $(BIN)/uv pip compile pyproject.toml --extra $$extra --constraint requirements.lock \
	  --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --quiet --output-file helm/images/locks/$$extra.lock; done
	@echo 'hatchling>=1.26' | env -u UV_FIND_LINKS -u UV_INDEX -u UV_EXTRA_INDEX_URL \
	  $(BIN)/uv pip compile - --constraint requirements.lock \
	  --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --quiet --output-file helm/images/locks/build.lock
	@echo 'ziglang>=0.13' | env -u UV_FIND_LINKS -u UV_INDEX -u UV_EXTRA_INDEX_URL \
	  $(BIN)/uv pip compile - --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --quiet --output-file requirements-compiler.lock $(LOCK_ARGS)
	@printf '%s\n' 'atheris~=3.0.0 ; python_version < "3.12" and platform_machine == "x86_64"' \
	    'atheris>=3.1 ; python_version >= "3.12" and platform_machine == "x86_64"' | \
	  env -u UV_FIND_LINKS -u UV_INDEX -u UV_EXTRA_INDEX_URL \
	  $(BIN)/uv pip compile - --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
	  --quiet --output-file requirements-fuzz.lock $(LOCK_ARGS)

.PHONY: clean
clean: ## Remove .venv and every cache
	rm -rf .venv .venv-gpu .venv-vllm .venv-lmcache .venv-sglang .venv-dynamo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist demo/out fabric/ostraca_fabric/native/*.so
	find $(CODE) tests benchmarks demo scripts __pycache__ -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(READY): scripts/setup requirements.lock requirements-compiler.lock pyproject.toml hatch_build.py $(NATIVE)
	@PYTHON='$(PYTHON)' OSTRACA_TORCH='$(OSTRACA_TORCH)' scripts/setup

$(READY_GPU): scripts/setup-gpu pyproject.toml
	@PYTHON='$(PYTHON)' OSTRACA_TORCH='$(OSTRACA_TORCH)' scripts/setup-gpu

$(READY_VLLM): scripts/setup-vllm pyproject.toml
	@PYTHON='$(PYTHON)' OSTRACA_TORCH='$(OSTRACA_TORCH)' scripts/setup-vllm

$(READY_SGLANG): scripts/setup-sglang pyproject.toml
	@PYTHON='$(PYTHON)' OSTRACA_TORCH='$(OSTRACA_TORCH)' scripts/setup-sglang

$(READY_LMCACHE): scripts/setup-lmcache pyproject.toml
	@PYTHON='$(PYTHON)' OSTRACA_TORCH='$(OSTRACA_TORCH)' scripts/setup-lmcache

$(READY_DYNAMO): scripts/setup-dynamo scripts/setup-vllm pyproject.toml
	@PYTHON='$(PYTHON)' OSTRACA_TORCH='$(OSTRACA_TORCH)' scripts/setup-dynamo
