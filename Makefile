# `make run` streams a story from the bundled model; `make test` checks style, types and tests. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

# A Vulkan wheel has a venv of its own, so that the tests keep theirs.
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

setup: ## create .venv with our llama.cpp wheel and the worker; seconds when nothing changed
	@$(PYTHON) -m builds setup --venv $(VENV) --backend $(BACKEND)

run: ## start the worker on the bundled model and print the curl line that streams a story
	@$(PYTHON) -m builds setup --to-run --venv $(VENV) --backend $(BACKEND)
	@$(VENV)/bin/llorch-$(BACKEND) $(ARGS)

ui: setup ## build the chat page that the worker serves at /chat/ (minutes once; with the pinned Node and npm)
	@$(PYTHON) -m builds ui
	@$(PYTHON) -m builds setup --venv $(VENV) --backend $(BACKEND)

test: setup lint pytest ## everything: style, types, tests

lint: setup ## ruff and mypy, without the tests
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# The tests start some hundred Pythons, each of which would compile all modules anew where this is set.
pytest: export PYTHONDONTWRITEBYTECODE :=
pytest: setup ## the tests alone, by three processes (TESTS="tests/process/api -k cancel" narrows them)
	$(VENV)/bin/pytest -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

fuzz: setup ## 10,000 made-up bodies against a real worker, schemas, templates, damaged GGUF headers against llama.cpp, and 100,000 random frames between the processes
	$(VENV)/bin/pytest -m long -rP tests/process/api/test_openapi.py tests/system/security/test_fuzz.py tests/unit/api/test_structured.py tests/unit/models/test_gguf_native.py tests/unit/wire/test_wire.py

routers: setup ## routers from PyPI, Prometheus and kubectl before three workers, counted (needs Debian's prometheus)
	$(VENV)/bin/pytest -m long -rP tests/system/routers

attack: setup ## half a minute of each attack on a real worker and 10,000 random connections, with /health and other clients watched
	$(VENV)/bin/pytest -m long -rP tests/system/security/test_under_attack.py tests/system/security/test_network.py tests/system/security/test_connections.py

asan: ## the suites of hybrids, windows, cancels, hostile files and grammars on llama.cpp under sanitizers (built once: half an hour)
	@$(PYTHON) -m builds setup --venv $(VENV)-asan --backend cpu --native --sanitized
	$(VENV)-asan/bin/python -m tools.sanitized

long: setup ## the tests that take minutes and need nothing more: fuzz, proxies, a crowd, vocabularies, 200 engines killed under streams, a fresh clone
	$(VENV)/bin/pytest -m long -rP tests/unit tests/process tests/system/worker tests/system/security tests/system/builds/test_fresh_clone.py

wheel: setup ## build dist/$(BACKEND)/*.whl and its SHA256SUMS
	$(PY) -m builds $(BACKEND)

smoke: wheel ## install that wheel into a fresh venv, list its devices, decode one token
	$(PY) -m builds smoke dist/$(BACKEND)/*.whl

bench: setup ## measure against llama-server and the others (BENCH="--help" for its flags, BENCH="--before CHECKOUT" for a short comparison)
	$(PY) -m tools.bench $(BENCH)

mutants: setup ## change the scheduler and the cache in 800 places, one at a time, and count what the tests notice (MUTANTS="--sample 100", "--of guesses stops parsers wire plan connection")
	$(PY) -m tools.mutants $(MUTANTS)

clients: setup ## what real clients from PyPI and npm can do with a worker, counted (minutes; CLIENTS="--failures")
	$(PY) -m tools.clients $(CLIENTS)

differential: setup ## 1,000 made-up requests on each of five models to llama-server and to the worker, compared field by field, and read by the SDKs' types (minutes: llama-server is built once)
	$(PY) -m tools.differential $(DIFFERENTIAL)

page-test: ui ## both pages in headless Chromium: used, stopped, attacked, read by axe (needs Debian's chromium; PICTURES=docs/pictures: README's anew)
	$(VENV)/bin/pip install --quiet --require-hashes --requirement builds/locks/page.txt
	$(VENV)/bin/pytest -m long tests/system/page

vulkan-test: ## plans and proofs on one, two and three GPUs with bounded memory, which Mesa's software device plays (builds the Vulkan wheel once)
	@$(PYTHON) -m builds setup --venv $(VENV)-vulkan --backend vulkan --native
	$(VENV)-vulkan/bin/pytest -m long -rP tests/system/vulkan

ray: setup ## install Ray Serve into .venv, for llorch-ray
	$(VENV)/bin/pip install --quiet --require-hashes --requirement builds/locks/fleet.txt

fleet-test: ray ## a real fleet on one machine: kills, rolls, load, overload, cancels, with figures (ROUNDS=20 for the full number)
	$(VENV)/bin/pytest -m long -rP tests/unit/fleet tests/system/fleet

gpu-report: GPU ?= $(if $(CARDS),--short --patience 5)
gpu-report: ## the half hour on a GPU: build, prove, try, measure (BACKEND=cpu GPU=--short, or BACKEND=vulkan CARDS=discrete:2000, rehearses it)
	@$(PYTHON) -m builds setup --venv $(REPORT_VENV) --backend $(BACKEND) $(if $(filter cuda vulkan,$(BACKEND)),--native)
	$(if $(CARDS),$(REPORT_VENV)/bin/python -m tools.gpu.cards $(CARDS)) $(REPORT_VENV)/bin/python -m tools.gpu --backend $(BACKEND) $(GPU)

chaos: setup ## ten minutes of kills, stops, resets, nonsense and a full disk against a real worker (SECONDS=3600 for an hour)
	$(PY) -m tools.chaos --seconds $(or $(SECONDS),600)

image-cpu: ## build the image llorch-cpu with docker, podman or buildah (REGISTRY=registry.example/team names it for one)
	$(PYTHON) -m builds image cpu --registry=$(REGISTRY)

image-cuda: ## build the image llorch-cuda (CUDA=12 for older drivers, ARCH=90 for one GPU generation, JOBS=8 compilers at once)
	$(PYTHON) -m builds image cuda --registry=$(REGISTRY) --pin cuda$(CUDA) --build-arg ARCH=$(ARCH) --build-arg JOBS=$(JOBS)

image-vulkan: ## build the image llorch-vulkan (DRIVERS=mesa-vulkan-drivers for AMD and Intel)
	$(PYTHON) -m builds image vulkan --registry=$(REGISTRY) --build-arg DRIVERS=$(DRIVERS)

image-metal: ## build the image llorch-metal, the guest of a Mac's podman machine
	$(PYTHON) -m builds image metal --registry=$(REGISTRY)

image-test: setup ## build the CPU and the Vulkan image on a bootstrapped Debian and try both over HTTP (an hour of compiling; needs podman)
	$(VENV)/bin/pytest -m long tests/system/images

qemu-test: setup ## run the CPU wheel on processors that are not here, arm64 by a cross compiler (long; needs qemu-user-static, podman)
	$(VENV)/bin/pytest -m long tests/system/builds/test_qemu.py tests/system/builds/test_arm64.py

parity-data: setup ## make the reference data of converter and chat templates anew, in a venv of its own with PyTorch and transformers
	$(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/pip install --quiet --require-hashes --requirement builds/locks/parity.txt
	$(VENV)-parity/bin/python -m tools.reference.make_parity_data
	$(VENV)-parity/bin/python -m tools.reference.make_definition_tensors
	$(VENV)-parity/bin/python -m tools.reference.make_config_defaults
	$(VENV)-parity/bin/python -m tools.reference.make_tiktoken_data
	$(VENV)-parity/bin/python -m tools.reference.make_tekken_data
	$(VENV)-parity/bin/python -m tools.reference.make_loglikelihoods
	$(VENV)-parity/bin/python -m tools.reference.make_adapter_data
	$(VENV)-parity/bin/python -m tools.reference.make_prompt_data
	PYTHONPATH=$$(echo $(VENV)-parity/lib/python3*/site-packages) $(PY) -m tools.reference.make_picture_data

bench-generators: setup ## what aiperf and guidellm, in environments of their own, measure of the worker and llama-server (BENCH="--help")
	$(PY) -m tools.bench.generators $(BENCH)

bench-convert: setup ## the converter against llama.cpp's own script, in parity-data's venv (minutes; BENCH="--outtypes f16")
	$(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/pip install --quiet --require-hashes --requirement builds/locks/parity.txt
	$(PY) -m tools.bench.convert_bench --peer-python $(VENV)-parity/bin/python $(BENCH)

script-test: setup ## models that only llama.cpp's own converter knows: converted, verified, compared and served (minutes; in parity-data's venv)
	$(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/pip install --quiet --require-hashes --requirement builds/locks/parity.txt
	PYTHONPATH=$$(echo $(VENV)-parity/lib/python3*/site-packages) $(VENV)/bin/pytest -rP -m long tests/unit/convert/test_upstream.py

lock: ## let the newest versions of all packages in, and pin those with their hashes (then run the tests)
	@$(PYTHON) -m builds lock --upgrade

clean: ## remove what was built in the checkout (the wheel cache stays)
	rm -rf $(VENV) $(VENV)-vulkan $(VENV)-asan $(VENV)-parity .venv-* dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .page-screenshots
