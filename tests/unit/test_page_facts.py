"""Counts, and claims that something is missing, on pages that no generator writes: each is compared with the code."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from megatron_dppo.config import describe
from megatron_dppo.config.loss_registry import loss_names
from source_folders import LIBRARIES, PAGES, TRAINER

ROOT = Path(__file__).parents[2]
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
MISSING = {
    "a critic (GAE)": r"critic|gae",
    "images": r"pixel|vision|multimodal",
    "FSDP": r"fsdp",
    "Muon": r"muon",
    "training of multi-token prediction": r"mtp|multi_token",
    "NIXL and RDMA transfers": r"nixl|rdma",
    "NVFP4 and MXFP8": r"nvfp4|mxfp8",
    "checkpoints in S3": r"s3",
    "a profiler": r"profil",
    "alerts that leave the machine": r"webhook|alert",
}
"""Features that features.md calls missing, and the names of keys and values that would offer them."""


FOREIGN = {
    "calculate_log_probs_and_entropy_chunk": "Stable-RL",
    "example_tool_call_multireward": "verifiers",
    "forward_cpu": "vLLM",
    "gather_from_tensor_model_parallel_region": "Megatron",
    "is_pause_cond": "SGLang",
    "iter_0000200": "Megatron-LM",
    "load_weights_from_distributed": "SGLang",
    "log_all": "Megatron-LM",
    "normalize_then_sum": "TRL",
    "pin_cpu_params": "Megatron",
    "receive_weights_from_distributed": "vLLM",
    "restore_weights_before_loading": "vLLM",
    "sched_autogroup": "Linux",
    "schema_valid": "verifiers",
    "sum_then_normalize": "TRL",
    "trainer_state": "TRL",
    "update_bucketed_weights_from_distributed": "SGLang",
    "use_torch_optimizer_for_cpu_offload": "Megatron",
}
"""Names of other programs that pages mention, by program."""


def page(name: str) -> str:
    """Return a page without line breaks."""
    return " ".join((ROOT / name).read_text().split())


def test_the_number_of_other_losses_is_that_of_the_configuration() -> None:
    dppo = [loss for loss in loss_names() if re.fullmatch(r"dppo_(binary|topk)_(tv|kl)", loss)]
    assert len(dppo) == 4
    assert f"[{len(loss_names()) - len(dppo)} others](" in page("README.md")


def test_the_number_of_plug_ins_is_that_of_the_folder() -> None:
    folders = [folder for folder in (ROOT / "examples/integrations").iterdir() if (folder / "dppo.py").is_file()]
    assert f"plug-ins of {NUMBERS[len(folders)]} other stacks" in page("docs/features.md")
    assert len(re.findall(r"\(\.\./examples/integrations/\w+/dppo\.py\)", page("docs/from_verl.md"))) >= len(folders)


def test_the_architecture_has_all_packages_and_those_that_the_trainer_imports() -> None:
    text = page("docs/architecture.md")
    table = text.split("### Core")[0]
    folders = {folder.parent.name for folder in ROOT.glob("packages/*/pyproject.toml")}
    listed = set(re.findall(r"\[`(\w+)`\]\(\.\./packages/\1/README\.md\)", table))
    assert listed == folders
    assert f"The {NUMBERS[len(LIBRARIES)]} libraries also build" in table
    imported = {
        name
        for file in TRAINER.rglob("*.py")
        for name in re.findall(r"^ *(?:from|import) megatron_dppo_(\w+)", file.read_text(), re.MULTILINE)
    }
    *first, last = (f"`{name}`" for name in sorted(imported))
    assert f"The trainer imports {', '.join(first)} and {last}, and no other:" in table
    commands = [point.value for point in entry_points(group="megatron_dppo.commands")]
    own = {value.rpartition(".")[2] for value in commands if value.startswith("megatron_dppo.commands.")}
    (row,) = re.findall(r"\| \*\*commands\*\* \| what you start to train: ([^|]*) \|", text)
    assert set(re.findall(r"`(\w+)`", row)) == own


def test_megatron_bridge_has_one_version() -> None:
    (tested,) = re.findall(r"'megatron-bridge==([\d.]+)'", page("Makefile"))
    assert f"Version {tested} was tried" in page("docs/models.md")
    assert f"| megatron-bridge | {tested} |" in page("docs/upstream.md")
    assert f"megatron-bridge=={tested}," in page("megatron_dppo/mcore/megatron_bridge.py")


@pytest.mark.parametrize("feature", MISSING)
def test_what_features_lists_as_missing_is_offered_by_no_key_and_no_value(feature: str) -> None:
    listed = page("docs/features.md").split("this one does not")[1].split("## Losses")[0]
    assert feature in listed
    offers = re.compile(rf"(?<![a-z])({MISSING[feature]})")
    keys = describe.keys()
    assert len(keys) > 200
    assert [key for key, field in keys.items() if offers.search(f"{key} {describe.type_name(field.annotation)}")] == []


def test_pages_agree_on_the_gpu_that_was_used() -> None:
    assert "one H200" in page("docs/setup.md") and "one H200" in page("docs/status.md")
    for name in ("docs/from_verl.md", "docs/setup.md", "README.md", "docs/features.md"):
        assert "none yet](status.md)" not in page(name) and "no set has run on GPUs" not in page(name)


def test_names_of_code_on_pages_exist() -> None:
    folders = ("megatron_dppo", "packages", "tests", "tools", "benchmarks", "examples", "launch")
    kinds = {".py", ".toml", ".sh", ".json", ".md"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    texts = [path.read_text() for path in files if path.name != Path(__file__).name]
    texts += [(ROOT / name).read_text() for name in ("Makefile", "setup.py", "pyproject.toml")]
    known = set(re.findall(r"\w+", "\n".join(texts)))
    missing = {
        name: path.name
        for path in PAGES
        for name in re.findall(r"`([a-z_]\w*_\w+)(?:\(\))?`", path.read_text())
        if name not in known and name.strip("_") not in FOREIGN
    }
    assert not missing
