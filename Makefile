# Every command of the project; `make help` lists them. Each one makes the virtual environment that
# it needs, so a machine with Python 3.11 or later and a C++17 compiler needs nothing else.

PYTHON ?= python3
JAX    ?=
ARGS   ?=

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# An environment belongs to one Python and one JAX, so that several of them live side by side.
TAG := $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])' 2>/dev/null)$(if $(JAX),-jax$(JAX))
DEMO  := .venv/demo-$(TAG)
TEST  := .venv/test-$(TAG)
BENCH := .venv/bench-$(TAG)
LINT  := .venv/lint-$(TAG)
WHEELS := .venv/wheels-$(TAG)
WHEEL := .venv/wheel-$(TAG)
MPI   := .venv/mpi-$(TAG)
XLA_GPU := .venv/xla-gpu-$(TAG)
# The JAX whose CUDA plugin runs over the fakes: what it asks of a driver is what they have.
XLA_GPU_JAX := 0.12.0.1

COMMA := ,
# Two workers (WORKERS=n for another number), since most of a test is one thread that traces and compiles. One that is
# done takes over half of what is left to another; neighbours, which share what they expect, stay together otherwise.
PARALLEL = -n $(or $(WORKERS),2) --dist worksteal

CXX_SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc -type f 2>/dev/null)
ALL_SOURCES := $(CXX_SOURCES) $(shell find jaxmp -name '*.py' 2>/dev/null)
CXX_STYLED   = $(shell git ls-files -co --exclude-standard 'csrc/*.h' 'csrc/*.cc' 'tests/*.h' 'tests/*.cc')

# $(call new_venv,directory,arguments of pip install): a failure leaves no half-made environment behind.
define new_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "jaxmp needs Python 3.11 or later, but PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1); pass PYTHON=<interpreter>" >&2; exit 1; }
@echo "setting up $(1) (a few minutes the first time)"
@[ -x $(1)/bin/pip ] || $(PYTHON) -m venv --clear $(1)
@$(1)/bin/pip install --quiet --disable-pip-version-check -C build-dir=build/$(notdir $(1)) $(2) $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
@touch $(1)/.ready
endef

# $(call wheel_venv,directory,extra of jaxmp,more packages): pip keeps an older wheel of the same version.
define wheel_venv
@[ ! -x $(1)/bin/pip ] || $(1)/bin/pip uninstall --quiet --yes jaxmp
$(call new_venv,$(1),$$(echo $(WHEEL)/*.whl)[$(2)] $(3))
endef

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo "  Variables: PYTHON=<interpreter>, JAX=<version; empty: the newest>, ARGS=<more arguments>"

.PHONY: demo
demo: $(DEMO)/.ready ## Train the digits example on four CPU devices
	$(DEMO)/bin/python examples/01_digits_mlp.py $(ARGS)

.PHONY: demo-mpi
demo-mpi: $(MPI)/.ready ## Train over four processes that mpiexec starts; MPI comes from PyPI
	PATH="$(CURDIR)/$(MPI)/bin:$$PATH" JAX_PLATFORMS=cpu mpiexec -n 4 python examples/06_many_processes.py

.PHONY: examples
examples: $(DEMO)/.ready ## Run every example of one process
	@for example in $(filter-out %_processes.py,$(wildcard examples/[0-9]*.py)); do echo "== $$example"; $(DEMO)/bin/python $$example; done

.PHONY: test
test: test-cpp test-python ## Run the C++ tests and the small suite of the Python tests

.PHONY: test-all
test-all: test-cpp ## Run the C++ tests and every case of the Python tests
	$(TEST)/bin/pytest $(PARALLEL) --exhaustive $(ARGS)

.PHONY: test-python
test-python: $(TEST)/.ready ## Run the Python tests only (ARGS="-k name" picks some)
	$(TEST)/bin/pytest $(PARALLEL) $(ARGS)

FLAG_TESTS = tests/ops/test_layers.py tests/ops/test_mlp.py tests/ops/test_einsum.py
.PHONY: test-flags
test-flags: $(TEST)/.ready ## Run a part of the Python tests under each flag that JAX marks as a coming default
	@for flag in $$($(TEST)/bin/python tests/coming_flags.py); do echo "== $$flag"; \
	  env $$flag $(TEST)/bin/pytest $(PARALLEL) $(FLAG_TESTS) --share 1/60 $(ARGS); done

.PHONY: fuzz
fuzz: $(TEST)/.ready ## Draw products at random and judge them (N=20000: how many, SEED=7: which)
	JAXMP_FUZZ=$(or $(N),2000) JAXMP_FUZZ_SEED=$(SEED) $(TEST)/bin/pytest tests/ops/test_drawn.py -k drawn_products --timeout=0 $(ARGS)

.PHONY: fuzz-attributes
fuzz-attributes: $(TEST)/.ready ## Change the attributes of calls at random, under the sanitizers (N=1000000: how often)
	@export JAXMP_FUZZ=$(or $(N),1000000); \
	$(call cpp_tests,cpp-asan-$(TAG),RelWithDebInfo,address$(COMMA)undefined,attribute_fuzz,--verbose)

.PHONY: test-cpp
test-cpp: $(TEST)/.ready ## Run the C++ tests only
	@$(call cpp_tests,cpp-$(TAG),Release,)

# What it needs of Debian's, on another machine than ARM's; nothing is installed here.
ARM_PACKAGES := g++-aarch64-linux-gnu qemu-user libstdc++6:arm64 zlib1g:arm64
.PHONY: test-aarch64
test-aarch64: $(TEST)/.ready ## Run the C++ tests for ARM's processors (aarch64) in an emulator
	@for needed in aarch64-linux-gnu-g++ qemu-aarch64 /lib/ld-linux-aarch64.so.1 /lib/aarch64-linux-gnu/libz.so.1; do \
	  command -v $$needed > /dev/null || [ -e $$needed ] || { echo "make test-aarch64 needs $$needed; on Debian and Ubuntu, as root:" >&2; \
	  echo "  dpkg --add-architecture arm64 && apt-get update && apt-get install $(ARM_PACKAGES)" >&2; exit 1; }; done
	@openblas=scipy-openblas32==$$($(TEST)/bin/python -c 'import importlib.metadata as m; print(m.version("scipy-openblas32"))'); \
	$(TEST)/bin/pip install --quiet --disable-pip-version-check --upgrade --target build/aarch64 --no-deps --only-binary=:all: \
	  --platform=manylinux2014_aarch64 $(foreach glibc,17 24 26 27 28,--platform=manylinux_2_$(glibc)_aarch64) $$openblas
	@export CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64-linux-gnu.cmake \
	  JAXMP_BLAS=$$(echo $(CURDIR)/build/aarch64/scipy_openblas32/lib/*openblas*.so); \
	$(call cpp_tests,cpp-aarch64-$(TAG),Release,)

.PHONY: mutations
mutations: $(TEST)/.ready ## Seed every fault of tests/mutations and see which test notices it (ARGS="--only name")
	@$(TEST)/bin/pip install --quiet --disable-pip-version-check nanobind
	$(TEST)/bin/python tests/mutations/run.py $(ARGS)

.PHONY: test-process
test-process: $(TEST)/.ready ## Run the tests of many processes, with faults (ARGS="-k name" picks some)
	$(TEST)/bin/pytest tests/process $(ARGS)

.PHONY: chaos
chaos: $(TEST)/.ready ## Run jobs with a fault at a random moment (N=200: how many, SEED=1 to repeat a run)
	$(TEST)/bin/python tests/process/chaos.py --jobs $(or $(N),200) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Of tests/gpu, what the fakes can run in minutes. PYTHONSAFEPATH: the installed wheel has the extension, the checkout not.
OVER_FAKES = not test_transform and (not promise or promise_about_bits[0])
.PHONY: test-xla-gpu
test-xla-gpu: $(TEST)/.ready $(XLA_GPU)/.ready ## Run programs on JAX's real CUDA plugin over a fake driver, without a GPU
	@$(call cpp_build,cpp-$(TAG),Release,,fakes)
	JAXMP_FAKES=$(CURDIR)/build/cpp-$(TAG)/fakes PYTHONPATH=tests/xla_gpu PYTHONSAFEPATH=1 \
	  $(XLA_GPU)/bin/pytest -p fake_gpus tests/xla_gpu --timeout=120 $(ARGS)
	@rm -rf build/gpu-session
	JAXMP_FAKES=$(CURDIR)/build/cpp-$(TAG)/fakes FAKE_CUDA_DEVICES=1 PYTHONPATH=tests/xla_gpu PYTHONSAFEPATH=1 \
	  $(XLA_GPU)/bin/python tests/gpu/gpu_session.py --out build/gpu-session --minutes 30 --bench="--quick --skip float8 float64 TF32" \
	  -p fake_gpus tests/gpu/test_calls.py tests/gpu/test_sharing.py -k "$(OVER_FAKES)" --share 0/4 $(ARGS)

.PHONY: test-gpu
test-gpu: ## Run the tests on real GPUs, in the environment of PYTHON as it is: nothing is installed
	@mkdir -p build
	JAXMP_REQUIRE_GPU=1 JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  $(PYTHON) -P -m pytest tests/gpu --timeout=900 $(ARGS) 2>&1 | tee build/test-gpu.log

.PHONY: schedules
schedules: $(TEST)/.ready ## Run programs of many calls with random delays on each rank (N=200: how many, SEED=1, MEMORY=off: over gloo)
	$(TEST)/bin/python tests/process/schedules.py --programs $(or $(N),200) --seed $(or $(SEED),0) --memory $(or $(MEMORY),on) $(ARGS)

.PHONY: soak
soak: $(TEST)/.ready ## Run 100,000 small and 1,000 large calls and watch memory and descriptors
	$(TEST)/bin/python tests/process/soak.py $(ARGS)

.PHONY: test-abi
test-abi: $(TEST)/.ready ## Compare our declarations with the real headers, from their wheels (Linux)
	$(TEST)/bin/pip install --quiet --disable-pip-version-check --no-deps nvidia-cublasmp-cu13 nvidia-cuda-runtime nvidia-nccl-cu13
	JAXMP_REQUIRE_ABI=1 $(TEST)/bin/pytest tests/project/test_abi.py $(ARGS)

.PHONY: test-cublasmp
test-cublasmp: $(TEST)/.ready ## Run the C++ tests, and what the real cuBLASMp does without a GPU (wheels of 700 MB)
	$(TEST)/bin/pip install --quiet --disable-pip-version-check --no-deps nvidia-cublasmp-cu13 nvidia-nccl-cu13 nvidia-cublas
	@export JAXMP_CUDA_WHEELS=$$($(TEST)/bin/python -c 'import nvidia.cublasmp as c; print(list(c.__path__)[0].rpartition("/")[0])'); \
	$(call cpp_tests,cpp-$(TAG),Release,)

.PHONY: determinism
determinism: $(DEMO)/.ready ## Check products and every promise about bits on this machine (ARGS=--quick for a short run)
	$(DEMO)/bin/python -P -m jaxmp selftest $(ARGS)

.PHONY: sanitize
sanitize: $(TEST)/.ready ## Run the C++ tests under the address, undefined-behaviour and thread sanitizers
	@$(call cpp_tests,cpp-asan-$(TAG),RelWithDebInfo,address$(COMMA)undefined)
	@$(call cpp_tests,cpp-tsan-$(TAG),RelWithDebInfo,thread)

# $(call cpp_build,build folder,build type,sanitizers,the one target). PATH gives CMake the environment's own ninja.
define cpp_build
export PATH="$(CURDIR)/$(TEST)/bin:$$PATH"; \
mkdir -p build; \
cmake -S . -B build/$(1) -G Ninja -DCMAKE_BUILD_TYPE=$(2) -DJAXMP_BUILD_TESTS=ON -DJAXMP_SANITIZE='$(3)' \
  -DPython_EXECUTABLE=$(CURDIR)/$(TEST)/bin/python > build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }; \
cmake --build build/$(1) $(if $(4),--target $(4))
endef

# $(call cpp_tests,build folder,build type,sanitizers,the one test to run,more options of ctest). Sanitizers leave out the
# runs with smaller instruction sets, which take as long again.
define cpp_tests
$(call cpp_build,$(1),$(2),$(3),$(if $(4),cpp_tests)); \
ctest --test-dir build/$(1) --output-on-failure --timeout 600 --parallel 2 $(if $(4),-R '^$(4)$$' $(5)) $(if $(3),-E '_with_(avx|portable)')
endef

.PHONY: lint
lint: $(LINT)/.ready ## Check style, formatting, types and layers (ruff, mypy, import-linter, clang-format)
	$(LINT)/bin/ruff check .
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/mypy
	$(LINT)/bin/mypy --strict --follow-imports=silent --cache-dir=.mypy_cache/strict tests/typing
	$(LINT)/bin/lint-imports --no-cache
	@echo "clang-format --dry-run -Werror, $(words $(CXX_STYLED)) files"
	@$(LINT)/bin/clang-format --dry-run -Werror $(CXX_STYLED)

.PHONY: format
format: $(LINT)/.ready ## Rewrite the sources in the project's style
	$(LINT)/bin/ruff check --fix .
	$(LINT)/bin/ruff format .
	$(LINT)/bin/clang-format -i $(CXX_STYLED)

.PHONY: bench
bench: $(BENCH)/.ready ## Compare with XLA and write the tables (ARGS=--quick for a short run)
	$(BENCH)/bin/python benchmarks/run.py $(ARGS)

.PHONY: bench-quick
bench-quick: $(TEST)/.ready ## See that the benchmarks run, in the environment of the tests
	$(TEST)/bin/python benchmarks/run.py --quick $(ARGS)

.PHONY: bench-gpu
bench-gpu: ## Compare with XLA and nvmath-python on a GPU, in the environment of PYTHON as it is (ARGS=--write-docs)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) benchmarks/bench_gpu.py $(ARGS)

.PHONY: docs
docs: $(TEST)/.docs ## Build the documentation site in build/docs, where warnings are errors; nothing is read from a network
	$(TEST)/bin/python -m sphinx -W --keep-going -n -q -d build/docs-doctrees docs build/docs $(ARGS)
	@echo "build/docs/index.html; to read it: python3 -m http.server -d build/docs"

.PHONY: wheels
wheels: $(WHEELS)/.ready ## Build the source distribution and this machine's wheels in dist, and try them in each Python
	.ci/wheels $(WHEELS)/bin

.PHONY: clean
clean: ## Remove the environments and everything that was built
	rm -rf .venv build dist docs/api docs/pictures .cache .mypy_cache .pytest_cache .ruff_cache

# The demo, MPI and XLA:GPU install one wheel, as a user would; tests use the Python files where they stand.
$(WHEEL)/.ready: $(ALL_SOURCES)
	@rm -rf $(WHEEL)/*.whl
	$(call new_venv,$(WHEEL),pip)
	@$(WHEEL)/bin/pip wheel --quiet --disable-pip-version-check --no-deps -C build-dir=build/$(notdir $(WHEEL)) \
	  --wheel-dir $(WHEEL) . || { rm $@; exit 1; }

$(DEMO)/.ready: $(WHEEL)/.ready
	$(call wheel_venv,$(DEMO),examples)

$(TEST)/.ready: $(CXX_SOURCES)
	$(call new_venv,$(TEST),--editable '.[test]')

# JAX's CUDA plugin and libdevice, and none of NVIDIA's libraries, which the fakes stand for.
$(XLA_GPU)/.ready: private JAX = $(XLA_GPU_JAX)
$(XLA_GPU)/.ready: $(WHEEL)/.ready
	$(call wheel_venv,$(XLA_GPU),test,jax-cuda13-plugin==$(XLA_GPU_JAX) nvidia-nvvm)

# The site shows jaxmp as it stands, so it is built with the environment of the tests and what the extra `docs` names.
$(TEST)/.docs: $(TEST)/.ready
	@$(TEST)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
	  | $(TEST)/bin/pip install --quiet --disable-pip-version-check -r /dev/stdin
	@touch $@

$(MPI)/.ready: $(WHEEL)/.ready
	$(call wheel_venv,$(MPI),mpi)

$(BENCH)/.ready: $(ALL_SOURCES)
	$(call new_venv,$(BENCH),'.[bench]')

$(LINT)/.ready: .ci/requirements-lint.txt
	$(call new_venv,$(LINT),-r .ci/requirements-lint.txt jax numpy)

$(WHEELS)/.ready: .ci/requirements-wheels.txt
	$(call new_venv,$(WHEELS),-r .ci/requirements-wheels.txt)
