# `make run` starts the worker on the bundled model; `make test` runs linter, type checker and tests. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

# A Vulkan wheel gets a separate venv, so that the tests keep theirs.
REPORT_VENV = $(VENV)$(if $(filter vulkan,$(BACKEND)),-vulkan)

# The backend of this machine's wheel: Metal on an Apple GPU, Accelerate on an Intel Mac, else the CPU.
UNAME := $(shell uname -s)-$(shell uname -m)
ifeq ($(UNAME),Darwin-arm64)
BACKEND ?= metal
else ifeq ($(UNAME),Darwin-x86_64)
BACKEND ?= accelerate
else
BACKEND ?= cpu
endif

.DEFAULT_GOAL := help
.PHONY: help setup run ui test lint format pytest wheel smoke bench mutants clients differential routers page-test vulkan-test ray fleet-test chaos fuzz attack asan long parity-data bench-generators bench-convert script-test
.PHONY: gpu-report image-cpu image-cuda image-vulkan image-metal image-test qemu-test lock clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv with our llama.cpp wheel and the worker (seconds if nothing has changed)
	@$(PYTHON) -m builds setup --venv $(VENV) --backend $(BACKEND)

run: ## start the worker on the bundled model and print the curl line that streams a story (ARGS="--port 8081")
	@$(PYTHON) -m builds setup --to-run --venv $(VENV) --backend $(BACKEND)
	@$(VENV)/bin/llorch-$(BACKEND) $(ARGS)

ui: setup ## build the chat page that the worker serves at /chat/ (minutes once; with the pinned Node and npm)
	@$(PYTHON) -m builds ui
	@$(PYTHON) -m builds setup --venv $(VENV) --backend $(BACKEND)

test: setup lint pytest ## run the linter, the type checker and the tests

lint: setup ## run ruff and mypy, without the tests
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# The tests start some hundred Python processes. With this variable set, each would compile all modules again.
pytest: export PYTHONDONTWRITEBYTECODE :=
pytest: setup ## run only the tests, in three processes (TESTS="tests/process/api -k cancel" selects some)
	$(VENV)/bin/pytest -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

fuzz: setup ## send a real worker 10,000 random bodies; also fuzz schemas, templates, GGUF headers (against llama.cpp) and 100,000 frames between the processes
	$(VENV)/bin/pytest -m long -rP tests/process/api/test_openapi.py tests/system/security/test_fuzz.py tests/unit/engine/test_template_fuzz.py tests/unit/api/test_structured.py tests/unit/models/test_gguf_native.py tests/unit/wire/test_wire.py

routers: setup ## test routers from PyPI, Prometheus and kubectl with three workers (needs Debian's prometheus)
	$(VENV)/bin/pytest -m long -rP tests/system/routers

attack: setup ## run half a minute of each attack on a real worker and 10,000 random connections, while watching /health and other clients
	$(VENV)/bin/pytest -m long -rP tests/system/security/test_under_attack.py tests/system/security/test_network.py tests/system/security/test_connections.py

asan: ## run the tests of hybrids, windows, cancels, hostile files and grammars with llama.cpp under sanitizers (built once: half an hour)
	@$(PYTHON) -m builds setup --venv $(VENV)-asan --backend cpu --native --sanitized
	$(VENV)-asan/bin/python -m tools.sanitized

long: setup ## run the tests that take minutes and need nothing else: fuzzing, proxies, many connections, vocabularies, 200 engines killed under streams, a fresh clone
	$(VENV)/bin/pytest -m long -rP tests/unit tests/process tests/system/worker tests/system/security tests/system/builds/test_fresh_clone.py

wheel: setup ## build dist/$(BACKEND)/*.whl and its SHA256SUMS
	$(PY) -m builds $(BACKEND)

smoke: wheel ## install that wheel into a fresh venv, list its devices, decode one token
	$(PY) -m builds smoke dist/$(BACKEND)/*.whl

bench: setup ## benchmark against llama-server and others (BENCH="--help" for its flags, BENCH="--before CHECKOUT" for a short comparison)
	$(PY) -m tools.bench $(BENCH)

mutants: setup ## mutate the scheduler and the cache in 800 places, one at a time, and count how many mutants the tests catch (MUTANTS="--sample 100", "--of guesses stops parsers wire plan connection")
	$(PY) -m tools.mutants $(MUTANTS)

clients: setup ## run real clients from PyPI and npm against a worker, and count what works (minutes; CLIENTS="--failures")
	$(PY) -m tools.clients $(CLIENTS)

differential: setup ## send 1,000 random requests for each of five models to llama-server and the worker, compare the answers field by field, and parse them with the SDKs' types (minutes: llama-server is built once)
	$(PY) -m tools.differential $(DIFFERENTIAL)

page-test: ui ## test the pages in headless Chromium, including attacks and accessibility (needs Debian's chromium; PICTURES=docs/pictures retakes the README's pictures)
	$(VENV)/bin/pip install --quiet --require-hashes --requirement builds/locks/page.txt
	$(VENV)/bin/pytest -m long tests/system/page

vulkan-test: ## test plans and residency on one, two and three GPUs with limited memory, simulated by Mesa's software device (builds the Vulkan wheel once)
	@$(PYTHON) -m builds setup --venv $(VENV)-vulkan --backend vulkan --native
	$(VENV)-vulkan/bin/pytest -m long -rP tests/system/vulkan

ray: setup ## install Ray Serve into .venv, for llorch-ray
	$(VENV)/bin/pip install --quiet --require-hashes --requirement builds/locks/fleet.txt

fleet-test: ray ## test a real fleet on one machine: kills, rolls, load, overload, cancels, with figures (ROUNDS=20 for the full number)
	$(VENV)/bin/pytest -m long -rP tests/unit/fleet tests/system/fleet

gpu-report: GPU ?= $(if $(CARDS),--short --patience 5)
gpu-report: ## build, prove, test and measure on a GPU, in half an hour (BACKEND=cpu GPU=--short, or BACKEND=vulkan CARDS=discrete:2000, rehearses it)
	@$(PYTHON) -m builds setup --venv $(REPORT_VENV) --backend $(BACKEND) $(if $(filter cuda vulkan,$(BACKEND)),--native)
	$(if $(CARDS),$(REPORT_VENV)/bin/python -m tools.gpu.cards $(CARDS)) $(REPORT_VENV)/bin/python -m tools.gpu --backend $(BACKEND) $(GPU)

chaos: setup ## attack a real worker with kills, stops, resets, nonsense and a full disk for ten minutes (SECONDS=3600 for an hour)
	$(PY) -m tools.chaos --seconds $(or $(SECONDS),600)

image-cpu: ## build the image llorch-cpu with docker, podman or buildah (REGISTRY=registry.example/team names it for a registry)
	$(PYTHON) -m builds image cpu --registry=$(REGISTRY)

image-cuda: ## build the image llorch-cuda (CUDA=12 for older drivers, ARCH=90 for one GPU generation, JOBS=8 for eight compilers at once)
	$(PYTHON) -m builds image cuda --registry=$(REGISTRY) --pin cuda$(CUDA) --build-arg ARCH=$(ARCH) --build-arg JOBS=$(JOBS)

image-vulkan: ## build the image llorch-vulkan (DRIVERS=mesa-vulkan-drivers for AMD and Intel)
	$(PYTHON) -m builds image vulkan --registry=$(REGISTRY) --build-arg DRIVERS=$(DRIVERS)

image-metal: ## build the image llorch-metal, the guest of a Mac's podman machine
	$(PYTHON) -m builds image metal --registry=$(REGISTRY)

image-test: setup ## build the CPU and the Vulkan image on a bootstrapped Debian and test both over HTTP (an hour of compiling; needs podman)
	$(VENV)/bin/pytest -m long tests/system/images

qemu-test: setup ## run the CPU wheel on emulated processors, and cross-compile it for arm64 (long; needs qemu-user-static, podman)
	$(VENV)/bin/pytest -m long tests/system/builds/test_qemu.py tests/system/builds/test_arm64.py

parity-data: setup ## regenerate the reference data of converter and chat templates, in a separate venv with PyTorch and transformers
	$(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/pip install --quiet --require-hashes --requirement builds/locks/parity.txt
	$(VENV)-parity/bin/python -m tools.reference.make_parity_data
	$(VENV)-parity/bin/python -m tools.reference.make_definition_tensors
	$(VENV)-parity/bin/python -m tools.reference.make_config_defaults
	$(VENV)-parity/bin/python -m tools.reference.make_tiktoken_data
	$(VENV)-parity/bin/python -m tools.reference.make_tekken_data
	$(VENV)-parity/bin/python -m tools.reference.make_loglikelihoods
	$(VENV)-parity/bin/python -m tools.reference.make_adapter_data
	PYTHONPATH=$$(echo $(VENV)-parity/lib/python3*/site-packages) $(PY) -m tools.reference.make_prompt_data
	PYTHONPATH=$$(echo $(VENV)-parity/lib/python3*/site-packages) $(PY) -m tools.reference.make_picture_data

bench-generators: setup ## measure the worker and llama-server with aiperf and guidellm, in separate environments (BENCH="--help")
	$(PY) -m tools.bench.generators $(BENCH)

bench-convert: setup ## benchmark the converter against llama.cpp's own script, in parity-data's venv (minutes; BENCH="--outtypes f16")
	$(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/pip install --quiet --require-hashes --requirement builds/locks/parity.txt
	$(PY) -m tools.bench.convert_bench --peer-python $(VENV)-parity/bin/python $(BENCH)

script-test: setup ## convert, verify, compare and serve models that only llama.cpp's own converter supports (minutes; in parity-data's venv)
	$(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/pip install --quiet --require-hashes --requirement builds/locks/parity.txt
	PYTHONPATH=$$(echo $(VENV)-parity/lib/python3*/site-packages) $(VENV)/bin/pytest -rP -m long tests/unit/convert/test_upstream.py

lock: ## update all packages to their newest versions and pin them with their hashes (then run the tests)
	@$(PYTHON) -m builds lock --upgrade

clean: ## remove everything built in the checkout (the wheel cache stays)
	rm -rf $(VENV) $(VENV)-vulkan $(VENV)-asan $(VENV)-parity .venv-* dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .page-screenshots
