# `make demo` and `make test` set themselves up: a virtual environment in .venv, the dependencies, the C++ build.
# Run again, they redo nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch as pyproject.toml, the one place that pins it, says.
TORCH := $(shell sed -n 's/^dependencies = \["\(torch[^"]*\)".*/\1/p' pyproject.toml)
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)

.PHONY: demo test slow opinfo lint format docs build sanitize access clean

demo: build
	$(BIN)/python examples/resnet50.py

# In two processes, whose OpenMP threads do not spin while they wait: they share the cores. What traces, compiles or
# starts processes for seconds, and all of PyTorch's operators, are left to `make slow`.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
test: build lint
	$(PYTEST) -m "not slow"

slow: build
	$(PYTEST) -m slow

# Every operator of PyTorch's database on blocked tensors: a table of what runs natively.
opinfo: build
	$(BIN)/python tests/opinfo_table.py

lint: $(VENV)/.dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(filter %.cpp %.h,$(SOURCES))

# What is made of the docstrings and of tb.show.
docs: build
	$(BIN)/python -m torch_blocked reference > docs/reference.md
	$(BIN)/python -m torch_blocked show nChw4c 1x6x2x2 -o docs/nChw4c.svg

format: $(VENV)/.dependencies
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter %.cpp %.h,$(SOURCES))

build: $(VENV)/.built

$(VENV)/.dependencies: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet "setuptools>=70.1" numpy ninja \
		$$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['test'])")
	touch $@

# Only what changed is compiled again.
$(VENV)/.built: $(VENV)/.dependencies $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own: -P keeps python from
# finding the one in this folder first.
SANITIZE := -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined
SANITIZED_TESTS := library amx winograd_amx library_pooling pool winograd grouped_winograd first first_winograd \
	winograd_weight_gradient packed_weights chain convolution_ranks random_convolutions gradients pooling pooling_backward \
	reorder reorder_kernels reorder_tiles reorder_types reorder_gradients operators operator_errors half linear post_ops \
	changes quick channels deferred deferred_writes deferred_bytes
sanitize: $(VENV)/.dependencies
	BUILD_FOLDER=build/sanitized/objects CXXFLAGS="$(SANITIZE) -O1 -fno-omit-frame-pointer" LDFLAGS="$(SANITIZE)" \
		$(BIN)/python setup.py --quiet build --build-lib build/sanitized/lib
	PYTHONPATH=$(CURDIR)/build/sanitized/lib $(BIN)/python -P -c "from importlib.util import find_spec; \
		assert '/sanitized/' in find_spec('torch_blocked').origin, 'the tests would find another build'"
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 OMP_WAIT_POLICY=passive \
		PYTHONPATH=$(CURDIR)/build/sanitized/lib $(BIN)/python -P -m pytest --numprocesses 2 --dist worksteal \
		$(SANITIZED_TESTS:%=tests/test_%.py)

# `bench reorder` of kernels that read and write what a reorder does, where and in the order it does, and shuffle nothing:
# its dst is wrong, its time the least that these loads and stores take. Beside `bench reorder` itself, whose column
# `tile` tells what the shuffles take. ACCESS: the options of both.
ACCESS ?= --dtype f32 bf16 --size 1x2048x7x7 --threads 1
access: build
	BUILD_FOLDER=build/access/objects CXXFLAGS=-DTORCH_BLOCKED_WITHOUT_SHUFFLES \
		$(BIN)/python setup.py --quiet build --build-lib build/access/lib
	$(BIN)/python -m torch_blocked bench reorder $(ACCESS) --json build/access/with_shuffles.json
	PYTHONPATH=$(CURDIR)/build/access/lib $(BIN)/python -P -m torch_blocked bench reorder $(ACCESS) \
		--before $(CURDIR)/build/access/with_shuffles.json

clean:
	rm -rf build $(VENV) torch_blocked/*.so *.egg-info
