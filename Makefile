# Two commands: make book, make test. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help book test mutants lab bench gpu strip clean

help:
	@echo "make book    run every notebook and build the book (_build/html/index.html)"
	@echo "make test    check the code, the notebooks and the built book"
	@echo "make mutants MODULE=fedlib/engine/data.py: put mistakes into it; does a test notice?"
	@echo "make lab     open the notebooks in JupyterLab"
	@echo "make bench   time the hot path against a plain loop"
	@echo "make gpu     check a GPU against the CPU, time it, go on with the large records"
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
	  echo "scikit-learn, tqdm and typer; 'make gpu PYTHON=/path/to/python' needs no more."; exit 1; }
	@touch $@

book: $(READY)
	@$(BIN)/python book/build.py

test: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# A sample of the mistakes; SAMPLE=0 tries all. TESTS names the tests, if not those that import it.
SAMPLE ?= 40
SEED   ?= 0
mutants: $(READY)
	@$(BIN)/python tests/mutants.py $(MODULE) --sample $(SAMPLE) --seed $(SEED) $(if $(TESTS),--tests $(TESTS))

lab: $(READY)
	@$(BIN)/jupyter lab notebooks

bench: $(READY)
	@$(BIN)/fedlib bench

# Any Python with what fedlib computes with will do: a machine without a network needs no more.
MINUTES ?= 25
OUT     ?= runs/gpu
ENOUGH  := $(shell "$(PYTHON)" -c 'import fedlib.gpu, sklearn' 2>/dev/null && echo yes)
gpu: $(if $(ENOUGH),,$(READY))
	@"$(if $(ENOUGH),$(PYTHON),$(BIN)/python)" -m fedlib gpu --minutes $(MINUTES) --out "$(OUT)"

strip: $(READY)
	@$(BIN)/python book/strip.py

clean:
	rm -rf _build dist .pytest_cache .ruff_cache
	find . -name $(VENV) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -print0 | xargs -0 rm -rf
