# The front door. CMake builds; everything lies in build/, the program is build/kv8.
#
#   make           the library and the program
#   make demo      compares KV cache formats on the model that ships
#   make serve     the model that ships, served: a page at http://127.0.0.1:8000, an API for clients
#   make check     every test (CMAKE_OPTIONS=... for another build than the default)
#   make check-clients  the clients that people use, from PyPI, against kv8 serve
#   make check-long  load generators from PyPI, hundreds of ends, ten minutes of abuse under each sanitizer
#   make check-gpu the tests that need a GPU, and what they ran on
#   make wheel     the Python package, in build/wheel
#   make check-torch  its tests with torch and transformers, from PyPI (6 GB, kept in TORCH_VENV)
#   make bench     kernel benchmarks
#   make format    clang-format over the tree
#   make install   PREFIX=/usr/local DESTDIR=
#   make clean     removes build/
#
# Each target first installs what it needs and this machine lacks (scripts/setup; nothing when all
# is there).
BUILD := build
PREFIX := /usr/local
DESTDIR :=
# How far a build is: ninja's line, which moves on a terminal.
export NINJA_STATUS := [%p of %t]$() 

# Where check-torch keeps torch between runs.
TORCH_VENV := $(HOME)/.cache/kv8/torch-venv

.PHONY: all demo serve check check-clients check-long check-gpu check-torch wheel bench format install clean
all:
	@scripts/setup build
	@test -f $(BUILD)/build.ninja || cmake -S . -B $(BUILD) -G Ninja -DKV8_TESTS=OFF
	@cmake --build $(BUILD) --target kv8_product

demo:
	@scripts/setup demo
	@$(MAKE) --no-print-directory all
	@scripts/demo $(BUILD)

serve: all
	@$(BUILD)/kv8 serve models/tiny-gpt-oss

check:
	@scripts/setup check
	@if python=$$(scripts/python_env $(BUILD)/venv); then \
	    set -- -DKV8_PYTHON=ON -DPython_EXECUTABLE=$$python; \
	else \
	    echo "make check: the Python package is SKIPPED"; set -- -DKV8_PYTHON=OFF; \
	fi; cmake -S . -B $(BUILD) -G Ninja -DKV8_TESTS=ON $(CMAKE_OPTIONS) "$$@"
	@cmake --build $(BUILD)
	@scripts/run_tests $(BUILD)

check-clients: all
	@scripts/setup check
	@scripts/check_clients $(BUILD)

check-long: all
	@scripts/setup check
	@scripts/check_long $(BUILD)

check-gpu:
	@scripts/setup check
	@python=$(TORCH_VENV)/bin/python; set --; \
	    [ ! -x "$$python" ] || set -- -DKV8_PYTHON=ON -DPython_EXECUTABLE="$$python"; \
	    cmake -S . -B $(BUILD) -G Ninja -DKV8_TESTS=ON "$$@"
	@cmake --build $(BUILD)
	@scripts/check_gpu $(BUILD) $(TORCH_VENV)/bin/python

wheel:
	@scripts/setup check
	@scripts/make_wheel $(BUILD)/wheel

check-torch:
	@scripts/setup check
	@python=$$(scripts/python_env $(TORCH_VENV) torch transformers accelerate) && \
	    cmake -S . -B $(BUILD) -G Ninja -DKV8_TESTS=ON -DKV8_PYTHON=ON -DPython_EXECUTABLE=$$python
	@cmake --build $(BUILD) --target kv8_python --target kv8
	@scripts/run_tests $(BUILD) -R test_python

bench: all
	@cmake -S . -B $(BUILD) -DKV8_BENCH=ON
	@cmake --build $(BUILD)
	@for bench in $(BUILD)/bench_*; do echo "$$bench" && $$bench || exit 1; done

format:
	@scripts/check_format --fix
	@$$(scripts/python_env $(BUILD)/venv ruff) -m ruff format python

install: all
	@DESTDIR=$(DESTDIR) cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	@rm -rf $(BUILD)
