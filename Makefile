# make demo    set up, train with three losses side by side, draw the result: megatron-dppo demo
# make example    set up, train the embedded example, show the result
# make example-llm    set up, download a real language model (SmolLM2-135M-Instruct, 93 MB), train it on sums: 3 to 5
#                     minutes; make example-llm-moe: its mixture of experts, with router replay
# make example-sglang, make example-vllm    the same with rollouts from a real inference server on the CPU, installed into an
#                     environment of its own (MEGATRON_DPPO_ENGINES, default ~/.cache/megatron_dppo/engines)
# make test    set up, run the trainer's unit tests without the slowest, a sample of the distributed ones, three whole runs
# make test-packages  the tests of packages/: each library alone, built and installed into an environment without the trainer;
#                     then those of the packages that need it
# make test-rest      the other unit tests (make test-rest-unit), distributed tests and whole runs (make test-rest-runs)
# make test-all       every suite: test, test-rest, test-faults, test-engines, test-python312, test-bridge, test-plugins, test-packages, test-gym,
#                     test-page, test-slurm
# make test-long      what test-rest leaves out, as others cover nearly the same (a quarter of an hour)
# make test-matrix    every loss on every layout, up to 8 processes, both Megatron versions: docs/results/parity.md (half an hour);
#                     router replay on every layout; every combination of rollout policies on real servers
# make docs    the documentation site into site/ (mkdocs); a link that leads nowhere is an error
# make wheel   wheel and source archive into dist/, checked as the package index would (twine)
# make bench-head    the head against other stacks' methods: counts and gates
# make test-plugins   the plug-ins of examples/integrations in the released verl, SkyRL and TRL, and MLflow and Trackio, with
#                     Python 3.12; these packages get an environment of their own (MEGATRON_DPPO_ENGINES)
# make test-gym    the tests of the extra [reasoning-gym]; installs it, which needs a C compiler
# make test-engines   the tests with real inference servers (SGLang, vLLM), which get environments of their own outside of
#                     this folder (MEGATRON_DPPO_ENGINES, default ~/.cache/megatron_dppo/engines)
# make test-python312  a sample of the tests (PYTHON312_TESTS below) with Python 3.12 and thus the newest Megatron Core, in
#                     .venv312: parity, families, checkpoints, router replay, compiled extensions, the demo from the wheel
# make test-bridge    models that Megatron Bridge builds, with Python 3.12; installs it into .venv312
# make test-page   the report of a run and the site in a real Chromium; installs it by apt-get where it is missing, which needs root
# make engines        install these servers, and nothing else
# make test-faults    faults by the thousand: the simulation of pool, sync, probe and rollouts on a virtual clock; runs that
#                     are killed at a sample of points and resumed
# make test-faults-long   the same with 100,000 schedules and 1,000 kills
# make test-faults-mutants   the simulation against 44 changed copies of the package, each of which it has to find
# make test-slurm     the launch scripts under a real Slurm on this machine; root, installs slurm-wlm and munge by apt-get
# Inside an environment that already has torch and Megatron nothing is installed over them (tools/setup_env.sh).

SHELL := /bin/bash
SEED ?= 0
OUT ?= runs/$@
export OMP_NUM_THREADS := 1
export PYTHONUNBUFFERED := 1
export TOKENIZERS_PARALLELISM := false
# Megatron warns in every process about optional packages that it does not find.
export PYTHONWARNINGS := ignore
# pytest keeps the test files that it has rewritten, also in an environment that forbids bytecode: the next suite begins sooner.
export PYTHONDONTWRITEBYTECODE :=

# Left out: every loss on every layout (make test-matrix has that with both versions), servers, the rest of tests/unit, and
# builds of extensions that fail, which are tested with Python 3.11.
# The demo is three whole runs from one base model; that a longer one learns is shown with Python 3.11.
PYTHON312_TESTS := tests/unit/mcore/test_extensions.py \
	tests/distributed/test_model_parity.py::test_one_process_equals_transformers \
	'tests/distributed/test_families.py::test_families_equal_transformers[1]' tests/distributed/test_checkpoints.py \
	'tests/distributed/test_router_replay.py::test_replay_on_every_layout[2-weights]' \
	tests/e2e/test_demo.py::test_the_demo_runs_from_the_wheel_alone

.PHONY: demo example example-llm example-llm-moe example-sglang example-vllm test test-rest test-rest-unit test-rest-runs test-all test-long engines test-engines test-faults test-faults-long test-faults-mutants test-slurm test-slurm-long test-matrix test-gym test-packages test-python312 test-bridge test-plugins test-page bench-head docs wheel lint setup setup-python312 clean

demo:
	@python=$$(tools/setup_env.sh) && $$python -m megatron_dppo.commands.main demo --output $(OUT) --seed $(SEED) $(ARGS)

example:
	@python=$$(tools/setup_env.sh) && $$python -m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_dppo.train \
		examples/chain_sum/dppo.toml --run.output_dir $(OUT) --run.overwrite true --run.seed $(SEED) $(ARGS)

example-llm example-llm-moe:
	@python=$$(tools/setup_env.sh) && source tools/environment.sh && pip_install $$python 'gguf>=0.17' 'accelerate>=1.10' && \
		$$python -m megatron_dppo.commands.main examples $(subst example-llm,smollm2,$@) --output $(OUT) --seed $(SEED) $(ARGS)

example-sglang:
	@tools/engines/sglang.sh install >/dev/null
	@PYTHON=$$(tools/setup_env.sh) && export PYTHON && launch/torchrun.sh examples/chain_sum/sglang.toml --nproc-per-node 2 \
		--run.output_dir $(OUT) --run.overwrite true --run.seed $(SEED) $(ARGS)

example-vllm:
	@tools/engines/vllm.sh install >/dev/null
	@PYTHON=$$(tools/setup_env.sh) && export PYTHON && launch/torchrun.sh examples/chain_sum/vllm.toml --nproc-per-node 2 \
		--run.output_dir $(OUT) --run.overwrite true --run.seed $(SEED) $(ARGS)

# The sample of make test, longest first: a run that learns, one that is ended by SIGTERM and resumed; one parity, fused
# head, the objective on two ranks, router replay, vocabulary shards.
SAMPLE := tests/e2e/test_training.py::test_reward_and_held_out_accuracy_rise \
	tests/e2e/test_training.py::test_everything_promised_is_written \
	tests/e2e/test_resume.py::test_sigterm_saves_and_the_next_run_continues \
	tests/distributed/test_model_parity.py::test_two_processes_equal_transformers \
	tests/distributed/test_fused_head.py \
	'tests/distributed/test_objective.py::test_losses_on_layouts[2]' \
	'tests/distributed/test_router_replay.py::test_replay_on_every_layout[2-experts]' \
	tests/distributed/test_vocab_logprobs.py

test:
	@python=$$(tools/setup_env.sh) && $$python -m pytest $(SAMPLE) tests/unit -m "not slow" -n 2 --dist loadfile \
		--no-loadscope-reorder --durations 15 $(ARGS)

test-rest: test-rest-unit test-rest-runs

# The libraries run all of theirs alone (make test-packages).
LIBRARIES = $(shell PYTHONPATH=tools python3 -c 'import source_folders; print(*source_folders.LIBRARIES)')
test-rest-unit:
	@python=$$(tools/setup_env.sh) && $$python -m pytest tests/unit packages $(addprefix --ignore packages/,$(LIBRARIES)) -m slow \
		--durations 15 $(ARGS)

test-rest-runs:
	@python=$$(tools/setup_env.sh) && $$python -m pytest tests/distributed tests/e2e -m "distributed or e2e" \
		$(addprefix --deselect ,$(SAMPLE)) --durations 25 $(ARGS)

test-all: test test-rest test-faults test-engines test-python312 test-bridge test-plugins test-packages test-gym test-page test-slurm

test-long:
	@python=$$(tools/setup_env.sh) && EVERYTHING=1 $$python -m pytest tests/unit tests/distributed tests/e2e -m long $(ARGS)

test-slurm-long: test-slurm
	@python=$$(tools/setup_env.sh) && EVERYTHING=1 $$python -m pytest tests/launch -m long $(ARGS)

setup-python312:
	@tools/setup_python312.sh $(PYTHON312)

test-python312:
	@python=$$(tools/setup_python312.sh $(PYTHON312)) && $$python -m pytest $(PYTHON312_TESTS) --durations 15 $(ARGS)

test-bridge:
	@python=$$(tools/setup_python312.sh $(PYTHON312)) && source tools/environment.sh && pip_install $$python --no-deps \
		'megatron-bridge==0.6.2' && $$python -m pytest tests/distributed/test_megatron_bridge.py --durations 5 $(ARGS)

test-plugins:
	@python=$$(tools/setup_python312.sh $(PYTHON312)) && plugins=$$(tools/engines/plugins.sh install $$python) && \
		PYTHONPATH=$(CURDIR) $$plugins -m pytest tests/plugins tests/unit/test_integrations.py tests/unit/report/test_trackers.py \
		-m "not slow" $(ARGS)

test-packages:
	@python=$$(tools/setup_env.sh) && tools/test_packages.sh $$python $(ARGS)

test-gym:
	@python=$$(tools/setup_env.sh) && source tools/environment.sh && pip_install $$python 'reasoning-gym>=0.1.20' && \
		$$python -m pytest packages/lab/tests/test_reasoning_gym.py $(ARGS)

test-page: docs
	@tools/install_chromium.sh
	@python=$$(tools/setup_env.sh) && $$python -m pytest tests/browser $(ARGS)

# The version whose torch is the trainer's; without a number the scripts take the newest that is tested.
TESTED_SGLANG = $(shell sed -n 's/^sglang = "\(.*\)"$$/\1/p' packages/engines/src/megatron_dppo_engines/serving/versions.toml)
engines:
	@tools/engines/sglang.sh install >/dev/null && tools/engines/sglang.sh install $(TESTED_SGLANG) >/dev/null
	@tools/engines/vllm.sh install >/dev/null && tools/engines/agents.sh install >/dev/null

test-engines: engines
	@python=$$(tools/setup_env.sh) && $$python -m pytest tests/engines --durations 10 $(ARGS)

test-faults:
	@python=$$(tools/setup_env.sh) && $$python -m pytest tests/faults --durations 10 $(ARGS)

test-faults-long:
	@python=$$(tools/setup_env.sh) && $$python -m tests.faults.simulation --count 100000 $(ARGS) && \
		$$python -m tests.faults.kill_points --limit 1000

test-faults-mutants:
	@python=$$(tools/setup_env.sh) && $$python -m tests.faults.mutants $(ARGS)

test-slurm:
	@tools/install_slurm.sh
	@tools/engines/sglang.sh install >/dev/null
	@python=$$(tools/setup_env.sh) && $$python -m pytest tests/launch --durations 10 $(ARGS)

test-matrix: engines
	@tools/run_matrix.sh $(PYTHON312)
	@python=$$(tools/setup_env.sh) && EVERYTHING=1 $$python -m pytest tests/engines -m long
	@python=$$(tools/setup_env.sh) && EVERYTHING=1 $$python -m pytest tests/distributed/test_router_replay.py tests/engines/test_stream.py \
		packages/plan/tests/test_plan_offload.py tests/distributed/test_batch_invariant.py

bench-head:
	@python=$$(tools/setup_env.sh) && PYTHONPATH=$$PWD $$python benchmarks/head.py --gates-only $(ARGS)

docs: .venv-docs/.installed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build  # not -q: that hides broken links, which strict counts

# setuptools leaves its work in the source folder, so it gets a copy.
wheel: .venv-docs/.installed
	@work=$$(mktemp -d) && git ls-files -z | xargs -0 cp --parents -t "$$work" && \
		.venv-docs/bin/python -m build -q --no-isolation "$$work" -o "$$work/built" && \
		.venv-docs/bin/python -m twine check --strict "$$work"/built/* && mkdir -p dist && mv "$$work"/built/* dist/ && rm -r "$$work"

.venv-docs/.installed: requirements/docs.txt
	@{ $${PYTHON:-python3} -m venv --clear .venv-docs && \
		source tools/environment.sh && pip_install .venv-docs/bin/python -r requirements/docs.txt && touch .venv-docs/.installed; }

lint:
	@python=$$(tools/setup_env.sh) && $$python -m ruff check . && $$python -m ruff format --check . && $$python -m mypy && \
		$$python tools/check_tests.py && \
		PATH=$$($$python -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH \
		shellcheck .ci/run launch/*.sh tools/*.sh tools/engines/*.sh tests/gpu/*.sh

setup:
	@tools/setup_env.sh

clean:
	rm -rf .venv .venv312 .venv-*.stamp runs build dist *.egg-info
