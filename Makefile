# Two commands: make book, make test. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes import the same files, and would each compile them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help book test test-long quick slow coverage test-avx2 mutants lines lab bench gpu ages hours strip pdf clean

help:
	@echo "make book    run every notebook and build the book (_build/html/index.html)"
	@echo "make pdf     print the built book into one file, _build/book.pdf; needs Chromium"
	@echo "make pdf CHAPTER=03_hierarchy: one chapter alone"
	@echo "make test    check the code and the notebooks: eight to fifteen minutes on two cores"
	@echo "make test-long  the rest: the built book in a browser, JupyterLab, batches on several machines"
	@echo "make quick   within a minute: lint, and the tests that import what has changed"
	@echo "make slow    which tests are slow, and not marked so"
	@echo "make coverage  which lines of fedlib no test runs"
	@echo "make test-avx2  the tests of numbers again, without AVX512"
	@echo "make mutants MODULE=fedlib/engine/data.py: put mistakes into it; does a test notice?"
	@echo "make lines   how many lines of code there are, by folder"
	@echo "make lab     open the notebooks in JupyterLab"
	@echo "make bench   time the hot path against a plain loop"
	@echo "make gpu     check a GPU against the CPU, time it, go on with the large records"
	@echo "make ages    write down what the history says of rules and records"
	@echo "make hours   time what claims want at the papers' own scale: twenty minutes on a quiet machine"
	@echo "make strip   clear the notebooks' outputs before a commit"
	@echo "make clean   remove what was built; the environment in $(VENV) stays"
	@echo
	@echo "The first of these to need it makes $(VENV). PYTHON=/path/to/python chooses the Python (3.11+)."

# Made again only when one of the three files changes.
$(READY): requirements.txt constraints.txt pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "There is no '$(PYTHON)' here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python"; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version.split()[0]; \
	  sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, and $(PYTHON) is " + v \
	  + ". Name another: make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No environment could be made. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): about a minute and 1.5 GB the first time."
	@$(BIN)/python -m pip install --quiet -r requirements.txt -c constraints.txt || { \
	  echo "Not everything could be installed. Without a network, name a Python that has torch, pandas, scipy,"; \
	  echo "scikit-learn, tqdm, typer and pydantic; 'make gpu PYTHON=/path/to/python' needs no more."; exit 1; }
	@touch $@

book: $(READY)
	@$(BIN)/python book/build.py

pdf: $(READY)
	@$(BIN)/python book/pdf.py $(if $(CHAPTER),--chapter "$(CHAPTER)")

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25
test: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(PYTEST) -m "not long"

test-long: $(READY)
	@$(PYTEST) -m long

quick: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/python tests/quick.py

SLOW ?= 1.5
slow: $(READY)
	@$(BIN)/python -m pytest -q -m "not slow" --unmarked $(SLOW)

coverage: $(READY)
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest -n 2 --dist loadfile $(TESTS)
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage report

# A processor without AVX512 gives another last bit. These make of one with it such a processor;
# test_instructions.py asks each library whether it has heard. One without has nothing to try again.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
  NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR" OPENBLAS_CORETYPE=Haswell \
  NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=
NUMBERS := averages beyond errata foundations gener* hierarchy* instructions local mixing models \
  own_model participation personalization* properties steps targets theory* tiers* \
  vertical vertical_[!m]* writers
LARGE := a_million_columns_in_little_memory news20_like_has_the_counts_of_its_card
test-avx2: $(READY)
ifneq ($(shell grep -m1 -ow avx512f /proc/cpuinfo 2>/dev/null),)
	@$(AVX2) $(PYTEST) $(LARGE:%=--deselect tests/test_vertical_data.py::test_%) \
	  $(NUMBERS:%=tests/test_%.py) \
	  tests/test_experiments.py::test_the_stored_smoke_record_is_made_again
else
	@echo "This processor has no AVX512: make test tries what there is."
endif

# A sample of the mistakes; SAMPLE=0 tries all. TESTS names the tests, if not those that import it.
SAMPLE ?= 40
SEED   ?= 0
mutants: $(READY)
	@$(BIN)/python tests/mutants.py $(MODULE) --sample $(SAMPLE) --seed $(SEED) $(if $(TESTS),--tests $(TESTS))

lines:
	@"$(PYTHON)" tests/lines.py

lab: $(READY)
	@$(BIN)/jupyter lab notebooks

bench: $(READY)
	@$(BIN)/fedlib bench

# Any Python with what fedlib computes with will do: a machine without a network needs no more.
MINUTES ?= 25
OUT     ?= runs/gpu
ENOUGH  := $(shell "$(PYTHON)" -c 'import fedlib.lab.gpu, pydantic, sklearn' 2>/dev/null && echo yes)
gpu: $(if $(ENOUGH),,$(READY))
	@"$(if $(ENOUGH),$(PYTHON),$(BIN)/python)" -m fedlib gpu --minutes $(MINUTES) --out "$(OUT)"

ages: $(READY)
	@$(BIN)/python -m fedlib.lab.evidence.ages

hours: $(READY)
	@$(BIN)/python -m fedlib.lab.evidence.wanted

strip: $(READY)
	@$(BIN)/python book/strip.py

clean:
	rm -rf _build dist .pytest_cache .ruff_cache .mypy_cache .coverage*
	find . -name $(VENV) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -print0 | xargs -0 rm -rf
