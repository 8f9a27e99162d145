# Every command of the project; `make help` lists them. Each one makes the virtual environment that
# it needs, so a machine with Python 3.11 or later and a C++17 compiler needs nothing else.

PYTHON ?= python3
JAX    ?=
ARGS   ?=
# Of the tests: a script to run in place of pytest, more packages (installed without those that they need), more options
# of ctest.
RUN    ?=
WITH   ?=
CTEST  ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-mpi examples test test-quick test-python test-cpp test-process test-clients chaos \
        test-xla-gpu test-gpu accept-gpus sanitize lint bench bench-gpu docs
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# An environment belongs to one Python and one JAX, so that several of them live side by side.
TAG := $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])' 2>/dev/null)$(if $(JAX),-jax$(JAX))
DEMO  := .venv/demo-$(TAG)
TEST  := .venv/test-$(TAG)
LINT  := .venv/lint-$(TAG)
WHEEL := .venv/wheel-$(TAG)
MPI   := .venv/mpi-$(TAG)
XLA_GPU := .venv/xla-gpu-$(TAG)
CLIENTS := .venv/clients-$(TAG)
# The JAX whose CUDA plugin runs over the fakes: what it asks of a driver is what they have.
XLA_GPU_JAX := 0.12.0.1
# The folder in build of the C++ tests.
CPP_BUILD ?= cpp-$(TAG)

COMMA := ,
# Two workers (WORKERS=n for another number), since most of a test is one thread that traces and compiles. One that is
# done takes over half of what is left to another; neighbours, which share what they expect, stay together otherwise.
PARALLEL = -n $(or $(WORKERS),2) --dist worksteal

CXX_SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc -type f 2>/dev/null)
ALL_SOURCES := $(CXX_SOURCES) $(shell find jaxmp -name '*.py' 2>/dev/null)
CXX_STYLED   = $(shell git ls-files -co --exclude-standard 'csrc/*.h' 'csrc/*.cc' 'tests/*.h' 'tests/*.cc' 'docs/*.h' 'docs/*.cc')

# $(call python_venv,directory): an environment with pip.
define python_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "jaxmp needs Python 3.11 or later, but PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1); pass PYTHON=<interpreter>" >&2; exit 1; }
@[ -x $(1)/bin/pip ] || $(PYTHON) -m venv --clear $(1)
endef

PINNED_JAX = $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))

# $(call new_venv,directory,arguments of pip install): a failure leaves no half-made environment behind. Shown are
# downloads of megabytes, what is compiled, [i/n], and after a failure all that pip says.
define new_venv
@echo "setting up $(1) (a few minutes the first time)"
$(call python_venv,$(1))
@mkdir -p build
@$(1)/bin/pip install --verbose --disable-pip-version-check $(2) $(PINNED_JAX) 2>&1 \
  | tee build/$(notdir $(1)).log \
  | { grep --line-buffered -oE '\[[0-9]+/[0-9]+\] .*|Downloading .*[0-9] MB\)|^Installing collected packages' || true; } \
  || { cat build/$(notdir $(1)).log; exit 1; }
@touch $(1)/.ready
endef

# $(call wheel_venv,directory,extra of jaxmp,more packages), by the pip that is next to the wheel. pip keeps an older wheel
# of the same version. Python compiles the modules that a program imports when it does: a tenth of what is installed.
define wheel_venv
@echo "step 3 of 4: installing the wheel and what the program needs in $(1)"
@if [ -x $(1)/bin/python ]; then $(WHEEL)/bin/pip --python $(1)/bin/python uninstall --quiet --yes jaxmp; \
  else $(PYTHON) -m venv --clear --without-pip $(1); fi
@$(WHEEL)/bin/pip --python $(1)/bin/python install --quiet --disable-pip-version-check --no-compile \
  $$(echo $(WHEEL)/*.whl)[$(2)] $(3) $(PINNED_JAX)
@touch $(1)/.ready
endef

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo "  Variables: PYTHON=<interpreter>, JAX=<version; empty: the newest>, ARGS=<more arguments>"
	@echo "  Of the tests: RUN=<a script in place of pytest>, WITH=<more packages>, CTEST=<options of ctest>"

demo: $(DEMO)/.ready ## Train the digits example on four CPU devices
	@echo "step 4 of 4: running"
	$(DEMO)/bin/python examples/01_digits_mlp.py $(ARGS)

demo-mpi: $(MPI)/.ready ## Train over four processes that mpiexec starts; MPI comes from PyPI
	@echo "step 4 of 4: running"
	PATH="$(CURDIR)/$(MPI)/bin:$$PATH" JAX_PLATFORMS=cpu mpiexec -n 4 python examples/06_many_processes.py

examples: $(DEMO)/.examples ## Run every example of one process
	@for example in $(filter-out %_processes.py,$(wildcard examples/[0-9]*.py)); do echo "== $$example"; $(DEMO)/bin/python $$example; done

# A sixth of the cases, another one in each run; tests without cases all run. The command line shows which, and
# `make test SHARE=2/6` runs it again.
SHARE ?= $(shell shuf -i 0-5 -n 1)/6
test: test-cpp ## Run the C++ tests and a drawn sixth of the Python tests' cases
	@$(MAKE) --no-print-directory test-python ARGS="--share $(SHARE) $(ARGS)"

# A case in 24 of the tests that tell most, for two minutes in a fresh clone; half of that compiles.
QUICK = core/product/test_table.py core/product/test_numerics.py core/product/test_hlo.py core/determinism/test_determinism.py \
        fuse/test_programs.py core/errors/test_errors.py
test-quick: $(TEST)/.ready ## Run some hundred Python tests, for a first look
	$(TEST)/bin/pytest $(PARALLEL) --share 1/24 $(addprefix tests/,$(QUICK)) $(ARGS)

test-python: $(TEST)/.ready ## Run the Python tests only (ARGS="-k name" picks some), or RUN="tests/jobs/soak.py", a script
	$(with)
	$(TEST)/bin/$(if $(RUN),python $(RUN),pytest $(PARALLEL)) $(ARGS)

test-cpp: $(TEST)/.ready ## Run the C++ tests only (CTEST="-R name" picks some)
	$(with)
	@$(call cpp_tests,$(CPP_BUILD),Release,)

test-process: $(TEST)/.ready ## Run the tests of many processes, with faults (ARGS="-k name" picks some)
	$(TEST)/bin/pytest $(PARALLEL) tests/jobs $(ARGS)

test-clients: $(CLIENTS)/.alone ## Run others' programs and tests on jaxmp (ARGS="-k flax" picks some; with CLIENT_TIMES=20 it times them)
	$(CLIENTS)/bin/pytest $(PARALLEL) tests/clients $(ARGS)

chaos: $(TEST)/.ready ## Run jobs with a fault at a random moment (N=200: how many, SEED=1 to repeat a run)
	$(TEST)/bin/python tests/jobs/chaos.py --jobs $(or $(N),200) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Of tests/gpu, what the fakes can run in minutes. PYTHONSAFEPATH: the installed wheel has the extension, the checkout not.
OVER_FAKES = not test_transform and (not promise or promise_about_bits[0])
test-xla-gpu: $(TEST)/.ready $(XLA_GPU)/.ready ## Run programs on JAX's real CUDA plugin over a fake driver, without a GPU
	@$(call cpp_build,cpp-$(TAG),Release,,fakes)
	JAXMP_FAKES=$(CURDIR)/build/cpp-$(TAG)/fakes PYTHONPATH=tests/xla_gpu PYTHONSAFEPATH=1 \
	  $(XLA_GPU)/bin/pytest -p fake_gpus tests/xla_gpu --timeout=120 $(ARGS)
	@rm -rf build/gpu-session
	JAXMP_FAKES=$(CURDIR)/build/cpp-$(TAG)/fakes FAKE_CUDA_DEVICES=1 PYTHONPATH=tests/xla_gpu PYTHONSAFEPATH=1 \
	  $(XLA_GPU)/bin/python tests/gpu/gpu_session.py --out build/gpu-session --minutes 30 --bench="--quick --skip float8 float64 TF32" \
	  -p fake_gpus tests/gpu/test_calls.py tests/gpu/test_sharing.py -k "$(OVER_FAKES)" --share 0/6 $(ARGS)
	JAXMP_FAKES=$(CURDIR)/build/cpp-$(TAG)/fakes FAKE_CUDA_DEVICES=2 FAKE_CUDA_JOB=job JAXMP_TIMEOUT=10 PYTHONSAFEPATH=1 \
	  PYTHONPATH=tests/xla_gpu/site:tests/xla_gpu $(XLA_GPU)/bin/python -m jaxmp accept --quick --out build/accept.json

test-gpu: ## Run the tests on real GPUs, in the environment of PYTHON as it is: nothing is installed
	@mkdir -p build
	JAXMP_REQUIRE_GPU=1 JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  $(PYTHON) -P -m pytest tests/gpu --timeout=900 $(ARGS) 2>&1 | tee build/test-gpu.log

accept-gpus: ## Prove cuBLASMp on the GPUs of this machine in 15 minutes, in the environment of PYTHON as it is
	@mkdir -p build
	$(PYTHON) -P -m jaxmp accept --out build/accept.json $(ARGS)

sanitize: $(TEST)/.ready ## Run the C++ tests under the address, undefined-behaviour and thread sanitizers
	@$(call cpp_tests,cpp-asan-$(TAG),RelWithDebInfo,address$(COMMA)undefined)
	@$(call cpp_tests,cpp-tsan-$(TAG),RelWithDebInfo,thread)

# Tests that look for NVIDIA's wheels find those of WITH.
define with
$(if $(WITH),$(TEST)/bin/pip install --quiet --disable-pip-version-check --no-deps $(WITH))
endef

# $(call cpp_build,build folder,build type,sanitizers,the one target). PATH gives CMake the environment's own ninja.
define cpp_build
export PATH="$(CURDIR)/$(TEST)/bin:$$PATH"; \
mkdir -p build; \
cmake -S . -B build/$(1) -G Ninja -DCMAKE_BUILD_TYPE=$(2) -DJAXMP_BUILD_TESTS=ON -DJAXMP_SANITIZE='$(3)' \
  -DPython_EXECUTABLE=$(CURDIR)/$(TEST)/bin/python > build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }; \
cmake --build build/$(1) $(if $(4),--target $(4))
endef

# $(call cpp_tests,build folder,build type,sanitizers). Sanitizers leave out the runs with smaller instruction sets, which
# take as long again.
define cpp_tests
$(call cpp_build,$(1),$(2),$(3)); \
$(if $(findstring cublasmp,$(WITH)),JAXMP_CUDA_WHEELS=$$(echo $(CURDIR)/$(TEST)/lib/python3*/site-packages/nvidia)) \
ctest --test-dir build/$(1) --output-on-failure --timeout 600 --parallel 2 $(CTEST) $(if $(3),-E '_with_(avx|portable)')
endef

lint: $(LINT)/.ready ## Check style, formatting, types, layers and phrases; ARGS=--fix rewrites the sources in the project's style
	$(LINT)/bin/ruff check $(ARGS) .
	$(LINT)/bin/ruff format $(if $(ARGS),,--check) .
	$(LINT)/bin/mypy
	$(LINT)/bin/mypy --strict --follow-imports=silent --cache-dir=.mypy_cache/strict tests/typing
	$(LINT)/bin/lint-imports --no-cache
	$(LINT)/bin/python .ci/words.py
	@echo "clang-format, $(words $(CXX_STYLED)) files"
	@$(LINT)/bin/clang-format $(if $(ARGS),-i,--dry-run -Werror) $(CXX_STYLED)

bench: $(TEST)/.ready ## Compare with XLA and write the tables (ARGS=--quick for a short run)
	$(TEST)/bin/python benchmarks/run.py $(ARGS)

bench-gpu: ## Compare with XLA and nvmath-python on a GPU, in the environment of PYTHON as it is (ARGS=--write-docs)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) benchmarks/bench_gpu.py $(ARGS)

docs: $(TEST)/.docs ## Build the documentation site in build/docs, where warnings are errors; nothing is read from a network
	$(TEST)/bin/python -m sphinx -W --keep-going -n -q -d build/docs-doctrees docs build/docs $(ARGS)
	@echo "build/docs/index.html; to read it: python3 -m http.server -d build/docs"

# The demo, MPI and XLA:GPU install one wheel, as a user would; tests use the Python files where they stand. The wheel's
# environment has what pyproject.toml names for a build, where pip would make one for each build and keep silent.
build_requires = import tomllib; print(end="\n".join(tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]))
build_wheel = import scikit_build_core.build as b; b.build_wheel("$(WHEEL)")
more_requires = import scikit_build_core.build as b; print(end="\n".join(b.get_requires_for_build_wheel()))
install_for_wheel = xargs -r -d '\n' $(WHEEL)/bin/pip install --quiet --disable-pip-version-check --no-compile
$(WHEEL)/.ready: $(ALL_SOURCES)
	@echo "step 1 of 4: setting up $(WHEEL)"
	$(call python_venv,$(WHEEL))
	@rm -rf $(WHEEL)/*.whl
	@$(WHEEL)/bin/python -c '$(build_requires)' | $(install_for_wheel)
	@$(WHEEL)/bin/python -c '$(more_requires)' | $(install_for_wheel)
	@echo "step 2 of 4: compiling; [i/n] counts the files"
	@PATH="$(CURDIR)/$(WHEEL)/bin:$$PATH" $(WHEEL)/bin/python -c '$(build_wheel)'
	@touch $@

$(DEMO)/.ready: $(WHEEL)/.ready
	$(call wheel_venv,$(DEMO),demo)

$(DEMO)/.examples: $(WHEEL)/.ready
	$(call wheel_venv,$(DEMO),examples)
	@touch $@

$(TEST)/.ready: $(CXX_SOURCES)
	$(call new_venv,$(TEST),--editable '.[test]')

# JAX's CUDA plugin and libdevice, and none of NVIDIA's libraries, which the fakes stand for.
$(XLA_GPU)/.ready: private JAX = $(XLA_GPU_JAX)
$(XLA_GPU)/.ready: $(WHEEL)/.ready
	$(call wheel_venv,$(XLA_GPU),test,jax-cuda13-plugin==$(XLA_GPU_JAX) nvidia-nvvm)

$(CLIENTS)/.ready: $(CXX_SOURCES) tests/clients/requirements.txt
	$(call new_venv,$(CLIENTS),--editable . pytest pytest-timeout pytest-xdist -r tests/clients/requirements.txt)

$(CLIENTS)/.alone: $(CLIENTS)/.ready tests/clients/requirements-no-deps.txt
	@$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/clients/requirements-no-deps.txt
	@touch $@

# The site shows jaxmp as it stands, so it is built with the environment of the tests and what the extra `docs` names.
$(TEST)/.docs: $(TEST)/.ready
	@$(TEST)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
	  | $(TEST)/bin/pip install --quiet --disable-pip-version-check -r /dev/stdin
	@touch $@

$(MPI)/.ready: $(WHEEL)/.ready
	$(call wheel_venv,$(MPI),mpi)

$(LINT)/.ready: .ci/requirements-lint.txt
	$(call new_venv,$(LINT),-r .ci/requirements-lint.txt jax numpy)
