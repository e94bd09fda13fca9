# Everything works from a bare clone: `make train` and `make test` first create .venv.
# PYTHON=/path/to/python3.12 sets the interpreter; by default it is searched for.

PYTHON ?=
HF_PYTHON ?= python3
ARGS ?=
REPO_URL ?=
SCRIPT ?=
JAX_VERSION := 0.11.2
PIP := -m pip --disable-pip-version-check
# Python compiles a module at its first import, and most modules are never imported. It
# must keep the compiled files: the trainer starts in 3.5 s with them, in 10 s without.
INSTALL := $(PIP) install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
# The slowest tests first, so that all workers end together; then all test files.
PLAN_TESTS = tests/scripts/test_compiled_kernels.py tests/scripts/test_zero_overlap.py \
  tests/scripts/test_tp_schedule.py tests/scripts/test_pipeline_overlap.py \
  $(shell grep -rl --include='*.py' 'mark\.plan' tests)
HF_TESTS = $(shell grep -rl --include='*.py' 'mark\.hf' tests)
TRACK_TESTS = $(shell grep -rl --include='*.py' 'mark\.track' tests)
STORE_TESTS = $(shell grep -rl --include='*.py' 'mark\.stores' tests)
EVAL_TESTS = $(shell grep -rl --include='*.py' 'mark\.eval' tests)
# Two processes, because a test mostly compiles, and compiles on one core.
PYTEST := -m pytest -n 2 --dist worksteal
# Tests of the newest releases, about two minutes: each package where it is used, and one
# sharded step with every option of the model.
NEWEST_TESTS := tests/config/test_config.py tests/test_recipes.py tests/test_imports.py \
  tests/mesh/test_axes.py tests/mesh/test_build.py tests/layers tests/ckpt/test_manager.py \
  tests/data/test_loader.py tests/kernels/attention/test_attention_choice.py \
  tests/kernels/gelu tests/kernels/cross_entropy tests/kernels/layer_norm/test_layer_norm.py \
  tests/pipeline/test_partition.py tests/trace/test_vjp.py tests/processes/test_progress.py \
  tests/step/test_pipelined.py::test_a_pipeline_has_the_loss_and_gradients_of_one_device[dp] \
  tests/step/test_step.py::test_the_state_is_born_and_stays_where_it_is_declared

.PHONY: help env env-plan env-hf env-eval env-track env-stores env-newest env-docs \
  train test test-plan test-hf test-eval test-track test-stores test-slurm \
  try-slurm test-services test-newest size docs evidence evidence-quick evidence-long dist lock clean

help:
	@echo "make env          the environment in .venv, at the versions of constraints.txt"
	@echo "make env-plan     the same, and what compiles for NVIDIA GPUs without one"
	@echo "make env-hf       torch, transformers, peft and openai in .venv-hf, which tests ask"
	@echo "make env-eval     mjax with lm-eval in .venv-eval"
	@echo "make env-track    mjax with wandb and MLflow in .venv-track"
	@echo "make env-stores   mjax with obstore and an S3 server in .venv-stores"
	@echo "make env-newest   mjax with the newest releases, in .venv-newest"
	@echo "make env-docs     MkDocs in .venv-docs"
	@echo "make train        train the demo recipe, 1500 steps; a short demo:"
	@echo "                  make train ARGS='--steps 50 --optim.warmup-steps 10'"
	@echo "make test         the gate: format, lint, types, tests"
	@echo "make test-plan    compile for described GPUs, and read what came out"
	@echo "make test-hf      compare with transformers, in both directions"
	@echo "make test-eval    tasks of lm-eval, compared with transformers"
	@echo "make test-track   runs tracked by wandb, offline, and by an MLflow server, here"
	@echo "make test-stores  s3:// and gs://, against servers on this machine"
	@echo "make test-slurm   launch on a real Slurm on this machine, as root"
	@echo "make try-slurm SCRIPT=my.sbatch  run your batch script on such a Slurm"
	@echo "make test-services  PostgreSQL, NATS, a full disk, page and docs in Chromium, as root"
	@echo "make test-newest  a short suite on the newest releases"
	@echo "make evidence     make the pages of docs/benchmarks anew that need no GPU"
	@echo "make evidence-quick  the cheap ones; make evidence-long: faults, kills, training"
	@echo "make size         lines of code by room, and the counts that have a budget"
	@echo "make docs         the docs site in build/site/html, warnings are errors"
	@echo "make dist         the wheel and the sdist in dist/, checked"
	@echo "make lock         rewrite constraints.txt, with jax $(JAX_VERSION)"
	@echo "make clean        remove the environments"

env: .venv/installed

# Rebuilt whenever an input changes, so that nothing stale remains. The stamp is written
# last, so that an interrupted installation starts again.
.venv/installed: pyproject.toml constraints.txt
	@python=$$(scripts/find_python.sh "$(PYTHON)") && \
	  echo "env: $$python" && "$$python" -m venv --clear .venv
	.venv/bin/python $(INSTALL) -c constraints.txt -e '.[data,dev]'
	@touch $@

env-plan: .venv/installed-plan

# In the same folder, so that a rebuilt .venv is extended again.
.venv/installed-plan: .venv/installed
	.venv/bin/python $(INSTALL) -c constraints.txt -e '.[plan]'
	@touch $@

env-hf: .venv-hf/installed

# Without mjax, on any Python from 3.10 to 3.13: the python3 found outside of this folder,
# where .python-version has no effect, or HF_PYTHON=/path/to/python.
.venv-hf/installed: constraints-hf.txt
	@cd / && "$(HF_PYTHON)" -m venv --clear "$(CURDIR)/.venv-hf"
	.venv-hf/bin/python $(INSTALL) -c constraints-hf.txt torch transformers peft openai
	@touch $@

env-eval: .venv-eval/installed

# mjax with lm-eval, whose packages are locked separately.
.venv-eval/installed: pyproject.toml constraints.txt constraints-eval.txt
	@python=$$(scripts/find_python.sh "$(PYTHON)") && \
	  "$$python" -m venv --clear .venv-eval
	.venv-eval/bin/python $(INSTALL) -c constraints.txt -c constraints-eval.txt \
	  -e '.[data,eval]'
	@touch $@

env-track: .venv-track/installed

# mjax with wandb and the MLflow server, which needs older packages than the others.
.venv-track/installed: pyproject.toml constraints-track.txt
	@python=$$(scripts/find_python.sh "$(PYTHON)") && \
	  "$$python" -m venv --clear .venv-track
	.venv-track/bin/python $(INSTALL) -c constraints-track.txt \
	  -e '.[track,wandb,mlflow]' mlflow
	@touch $@

env-stores: .venv-stores/installed

# mjax with obstore, and a server that speaks S3, which asks older packages than the others.
.venv-stores/installed: pyproject.toml constraints-stores.txt
	@python=$$(scripts/find_python.sh "$(PYTHON)") && \
	  "$$python" -m venv --clear .venv-stores
	.venv-stores/bin/python $(INSTALL) -c constraints-stores.txt -e '.[data,s3,gs]' \
	  'moto[s3,server]' beartype hypothesis pytest pytest-timeout
	@touch $@

env-docs: .venv-docs/installed

# Without mjax: mkdocstrings reads its source and imports nothing.
.venv-docs/installed: constraints-docs.txt
	@python=$$(scripts/find_python.sh "$(PYTHON)") && \
	  "$$python" -m venv --clear .venv-docs
	.venv-docs/bin/python $(INSTALL) -c constraints-docs.txt \
	  mkdocs-material mkdocstrings-python ruff
	@touch $@

train: env
	.venv/bin/python -m mjax.train $(ARGS)

# Three processes, because the tests of launches mostly wait.
test: env
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright --pythonpath .venv/bin/python
	.venv/bin/python $(PYTEST) -n 3 $(ARGS)

# Distributed by file, so that the tests of a file share compilations.
test-plan: env-plan
	.venv/bin/python $(PYTEST) --dist loadfile --no-loadscope-reorder \
	  -m 'plan and not slow' $(PLAN_TESTS) $(ARGS)

# In one process, so that the outputs of transformers are computed once.
test-hf: env env-hf
	.venv/bin/python -m pytest -m hf $(HF_TESTS) $(ARGS)

# In one process, so that the outputs of lm-eval and transformers are computed once.
test-eval: env env-eval env-hf
	.venv/bin/python -m pytest -m eval $(EVAL_TESTS) $(ARGS)

# In one process, so that the MLflow server starts once.
test-track: env env-track
	.venv/bin/python -m pytest -m track $(TRACK_TESTS) $(ARGS)

# In one process: servers start in milliseconds, and tests compile little.
test-stores: env-stores
	.venv-stores/bin/python -m pytest -m stores $(STORE_TESTS) $(ARGS)

# A real Slurm with several nodes on this machine. It needs root and, on Debian:
# apt-get install slurmctld slurmd slurm-client munge
test-slurm: env
	.venv/bin/python -m pytest tests/launch/test_slurm.py \
	  tests/scripts/test_try_slurm.py -m slurm $(ARGS)

# A batch script on such a Slurm, as long as its job runs. NODES and GPUS are the size of
# the cluster; ARGS are options of sbatch, which override those of the script.
NODES ?= 3
GPUS ?= 0
try-slurm: env
	@.venv/bin/python -m scripts.clusters.try_slurm "$(SCRIPT)" \
	  --nodes "$(NODES)" --gpus "$(GPUS)" -- $(ARGS)

# A real PostgreSQL, NATS, Chromium and small disk on this machine, in their own folders.
# It needs root and the right to mount a tmpfs, and installs missing Debian packages. npm
# downloads axe-core, which checks the accessibility of the live page and the docs.
test-services: env docs
	@ls /usr/sbin/nats-server /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || \
	  apt-get install -y --no-install-recommends nats-server postgresql
	@ls /usr/bin/chromium /usr/bin/npm > /dev/null 2>&1 || \
	  apt-get install -y --no-install-recommends chromium npm
	.venv/bin/python -m pytest tests/observe tests/run/test_disk_space.py \
	  tests/scripts/test_site_pages.py -m services $(ARGS)

env-newest: .venv-newest/installed

# The newest releases of the day. `make clean` first to look for newer ones.
.venv-newest/installed: pyproject.toml
	@python=$$(scripts/find_python.sh "$(PYTHON)") && \
	  "$$python" -m venv --clear .venv-newest
	.venv-newest/bin/python $(INSTALL) --upgrade \
	  --upgrade-strategy eager -e '.[data,dev]'
	@touch $@

# Warnings are shown but are not errors, because they concern future versions.
test-newest: env-newest
	.venv-newest/bin/python -c 'import jax; print("newest jax:", jax.__version__)'
	.venv-newest/bin/python $(PYTEST) -W default $(NEWEST_TESTS)

# The pages of docs/benchmarks, one after the other, then docs/evidence. A script fails if
# a bound on its page does not hold; its old page stays. ARGS=--changed skips pages that
# the present code made. Pages of faults, kills and training are in evidence-long.
evidence: env-plan
	.venv/bin/python -m scripts.evidence_index --run quick cpu $(ARGS); code=$$?; \
	  .venv/bin/python -m scripts.evidence_index --write && exit $$code

evidence-quick: env-plan
	.venv/bin/python -m scripts.evidence_index --run quick

evidence-long: env-plan env-hf env-stores
	.venv/bin/python -m scripts.evidence_index --run long $(ARGS); code=$$?; \
	  .venv/bin/python -m scripts.evidence_index --write && exit $$code

size: env
	.venv/bin/python -m scripts.size --run

# REPO_URL=https://github.com/OWNER/NAME adds links to it, and to Colab for the notebooks.
# The theme's notice about MkDocs 2 does not concern these pages.
docs: env env-docs
	.venv/bin/python -m scripts.site.stage $(if $(REPO_URL),--repo-url '$(REPO_URL)')
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict -f build/site/mkdocs.yml
	@echo "docs: the site is in build/site/html. Its search needs a server. Run"
	@echo "  python3 -m http.server -b 127.0.0.1 -d build/site/html 8000"
	@echo "and open http://127.0.0.1:8000, from another machine after"
	@echo "  ssh -L 8000:127.0.0.1:8000 HOST"

dist: env
	rm -rf build dist
	.venv/bin/python -m build --no-isolation
	.venv/bin/twine check --strict dist/*

# Resolves names and versions of every extra without its own constraints; installs
# nothing. Extras of the same jax cannot have two versions of CUDA.
LOCKED := cuda13,data,dev,hub,kubernetes,launch,observe,observe-scale,plan,serve,track
lock:
	@python=$$(scripts/find_python.sh "$(PYTHON)") && \
	  "$$python" -m venv --clear .venv-lock
	.venv-lock/bin/python $(PIP) install --quiet --dry-run --ignore-installed \
	  --report .venv-lock/report.json \
	  jax==$(JAX_VERSION) jaxlib==$(JAX_VERSION) \
	  jax-cuda13-plugin==$(JAX_VERSION) jax-cuda13-pjrt==$(JAX_VERSION) \
	  -e '.[$(LOCKED)]'
	.venv-lock/bin/python scripts/locked.py .venv-lock/report.json > constraints.txt
	rm -rf .venv-lock

clean:
	rm -rf .venv .venv-hf .venv-eval .venv-track .venv-stores .venv-newest .venv-docs \
	  .venv-lock
