# Everything runs in .venv, which is made on first use. Needed beforehand: Python 3.10+ with venv, make. No GPU.
#
#   make demo     classify images of clothes with float and with integer attention; writes qflash-report/
#   make test     run the test suite
#   make help     list the other targets

PYTHON ?= python3
WORKERS ?= auto
# Each process gets neighbouring tests, which share the networks that they make
PARALLEL = -n $(WORKERS) --dist worksteal
ARGS ?=
TIMES ?= 30

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# We install with --no-compile: of 2,400 files of PyTorch alone the tests import a part. What they import is compiled once
# and kept here, even where the environment forbids it, since the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache

# Bounds: the newest versions this tree was tested with; lint tools are pinned because their output is part of the check.
REQUIREMENTS := "torch<2.16" "triton<3.10" "torchvision<0.30" "timm<1.1" "transformers<6" "numpy<3" "pandas<4" "scipy<2" \
	"onnx<2" "onnxruntime<2" "ruff==0.17.5" "mypy==2.4.1"

# Without its dependencies: it asks for an older NumPy than it needs. What it imports comes with onnx and onnxruntime.
TOSA := "tosa-tools==2026.8.*"

# The oldest versions that pyproject.toml allows, with the oldest Python where there is one (in pyenv under its number).
# Triton 3.6's interpreter does not run with NumPy 2.4.
FLOORS := $(shell grep -oE '"(torch|triton|timm|transformers)>=[0-9.]+' pyproject.toml | sort -u | sed 's/>=/==/; s/$$/.*"/')
WHERE := -c 'import ensurepip, sys; print(sys.executable)' 2>/dev/null
find_python = $(shell $(1) $(WHERE) || PYENV_VERSION=$(2) $(1) $(WHERE) || echo "$(PYTHON)")
FLOOR_PYTHON ?= $(call find_python,python3.10,3.10)

.PHONY: help setup demo test test-all test-floor test-python test-ray fuzz sanitize sanitize-gpu lint format hooks rtl-tools verify verify-triton36 train ladder report real site clean
.DEFAULT_GOAL := help

help:
	@echo "make demo             float against integer attention on a small image classifier (report in qflash-report/)"
	@echo "make test             the test suite; WORKERS=n sets the number of processes, ARGS=... goes to pytest"
	@echo "make test-all         with all slow cases, an hour; make test runs a fixed part of them"
	@echo "make test-floor       a few of the tests with the oldest PyTorch, Triton, timm and transformers (another 6 GB)"
	@echo "make test-python      half of the test suite, on the wheel, with PYTHON=python3.13 or another one (another 6 GB)"
	@echo "make test-ray         the examples of examples/ that run on Ray, with workers and replicas killed; installs Ray (600 MB)"
	@echo "make fuzz             random calls of the public operators, 30 times as many as in the test suite: ten minutes; TIMES=n"
	@echo "make sanitize         the CPU kernels under sanitizers, for every instruction set; ARGS='--share 0.1' for a tenth"
	@echo "make sanitize-gpu     the GPU kernels under compute-sanitizer; needs a GPU and NVIDIA's CUDA toolkit"
	@echo "make lint             ruff check, ruff format --check, mypy"
	@echo "make format           ruff format"
	@echo "make hooks            let git run make lint's tools on what is committed (pre-commit)"
	@echo "make rtl-tools        Icarus Verilog, Verilator and Yosys by apt-get, for the tests of rtl/; without it these are skipped"
	@echo "make verify           compile the kernels for every target and look for float instructions; hours, a sample"
	@echo "                      with ARGS='--sample 40'"
	@echo "make verify-triton36  the same with Triton 3.6"
	@echo "make train            train the small models again; Fashion-MNIST's need a GPU; ARGS='digits-vit' for one"
	@echo "make ladder           measure docs/algorithm.md's accuracy figures again"
	@echo "make report           the paper's tables and figures beside what was measured (qflash-reproduction/)"
	@echo "make real             pretrained networks on real photos, sentences and Fashion-MNIST (qflash-real/); downloads 200 MB"
	@echo "make site             the documents as a web site, in build/site/"
	@echo "make setup            only make .venv, where there is none; PYTHON=... picks the interpreter"
	@echo "make clean            remove .venv, caches and reports"

setup: $(READY)

$(READY): pyproject.toml lab/pyproject.toml Makefile
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed; choose one with PYTHON=python3.x" >&2; exit 1; }
	@echo "Installing into $(VENV): several minutes the first time, mostly PyTorch"
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[timm,dev,onnx]" --editable ./lab $(REQUIREMENTS)
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps --only-binary :all: $(TOSA) \
		|| echo "No tosa-tools for this machine: the tests of TOSA are skipped" >&2
	@touch $(READY)

demo: $(READY)
	$(BIN)/qflash-lab demo --output qflash-report $(ARGS)

test-all: EVERY := --all
test test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(EVERY) $(ARGS)
	$(if $(ARGS),,TRITON_INTERPRET=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(EVERY) \
		tests/kernels/test_gluon_on_ptx.py)

build/floor: pyproject.toml lab/pyproject.toml Makefile
	rm -rf $@
	"$(FLOOR_PYTHON)" -m venv $@
	$@/bin/python -m pip install --quiet --no-compile --editable . $(FLOORS) "numpy<2.4" pytest pytest-xdist hypothesis
	$@/bin/python -m pip install --quiet --no-compile --no-deps --editable ./lab
	@touch $@

# What meets PyTorch's and the models' own interfaces, and kernels in the interpreter
test-floor: build/floor
	OMP_NUM_THREADS=1 build/floor/bin/python -m pytest $(PARALLEL) $(or $(ARGS),tests/core/test_api.py tests/core/test_compile.py \
		tests/core/test_defaults.py tests/integrations/test_transformers.py tests/integrations/test_timm.py tests/core/test_cli.py)

# The package from its wheel, with the newest versions that another Python gets
build/python%: pyproject.toml lab/pyproject.toml Makefile
	rm -rf $@
	"$(call find_python,$(PYTHON),$*)" -m venv $@
	$@/bin/python -m pip install --quiet --no-compile ".[timm,dev,onnx]" ./lab $(REQUIREMENTS)
	@touch $@

test-python: build/$(notdir $(PYTHON))
	$</bin/python -m pip install --quiet --no-deps --force-reinstall . ./lab
	OMP_NUM_THREADS=1 $</bin/python scripts/record_python_tests.py $(ARGS)

$(VENV)/.ready-ray: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[ray]" $(REQUIREMENTS)
	@touch $@

# Not in parallel: every test starts a cluster on all cores
test-ray: $(VENV)/.ready-ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --all tests/scale $(ARGS)

fuzz: $(READY)
	QFLASH_FUZZ=$(TIMES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) tests/fuzz $(ARGS)

sanitize: $(READY)
	$(BIN)/python scripts/sanitize_cpu.py $(ARGS)

sanitize-gpu: $(READY)
	$(BIN)/python scripts/sanitize_gpu.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .

hooks: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile "pre-commit<5"
	$(BIN)/pre-commit install

verify: $(READY)
	$(BIN)/qflash-lab verify $(ARGS)

build/triton36: $(READY)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@ "triton==3.6.0"
	@touch $@

verify-triton36: build/triton36
	PYTHONPATH=build/triton36 $(BIN)/qflash-lab verify $(ARGS)

train: $(READY)
	$(BIN)/python scripts/train_models.py $(ARGS)

ladder: $(READY)
	$(BIN)/python benchmarks/ladder.py $(ARGS)

report: $(READY)
	$(BIN)/qflash-lab report $(ARGS)

$(VENV)/.ready-real: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile "onnx<2" "onnxruntime<2"
	@touch $@

real: $(VENV)/.ready-real
	$(BIN)/qflash-lab real $(ARGS)

$(VENV)/.ready-docs: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[docs]" $(REQUIREMENTS)
	@touch $@

site: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf $(VENV) build dist qflash-report qflash-reproduction qflash-real .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Free tools for rtl/. Where apt-get is not there, or not allowed, the tests that need them say so and are skipped.
RTL_TOOLS := iverilog verilator yosys
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)
rtl-tools:
	@for tool in $(RTL_TOOLS); do command -v $$tool >/dev/null || missing=1; done; [ -z "$$missing" ] \
		|| { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq --no-install-recommends $(RTL_TOOLS) >/dev/null; } \
		|| echo "$(RTL_TOOLS) are not installed here: tests of rtl/ that need them will be skipped" >&2
