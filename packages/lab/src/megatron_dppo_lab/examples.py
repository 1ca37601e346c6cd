"""``megatron-dppo examples``: list, copy or run the examples and launch scripts of the package."""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import disk_errors
from megatron_dppo_lab.example_run import RUNNABLE, run_example
from megatron_dppo_lab.shipped import shipped_folder

HELP = "list, copy or run the examples; copy the launch scripts"
HAS_OVERRIDES = True

LAUNCH = "launch"
_NOT_COPIED = shutil.ignore_patterns("__pycache__")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``examples``."""
    parser.add_argument("name", nargs="*", help="examples to copy, or one to copy and run (default: list them)")
    parser.add_argument(
        "--to", default=".", help="copy to DIR/examples/NAME and DIR/launch (default: the current folder)"
    )
    runnable = ", ".join(RUNNABLE)
    parser.add_argument("--copy-only", action="store_true", help=f"copy without running ({runnable})")
    parser.add_argument("--output", type=Path, help="folder of the run (default: runs/NAME)")
    parser.add_argument("--processes", type=int, help="training processes of the run (default: the example's, 2 or 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default 0)")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """List, copy or run examples. Existing files stay as they are."""
    if len(options.name) == 1 and options.name[0] in RUNNABLE and not options.copy_only:
        return _run_example(options, overrides)
    if overrides:
        raise ConfigError(f"unexpected argument {overrides[0]!r}; examples takes names and --to DIR")
    examples = shipped_folder("examples")
    sources = {folder.name: folder for folder in sorted(examples.iterdir()) if folder.is_dir()}
    sources[LAUNCH] = shipped_folder(LAUNCH)
    if not options.name:
        for name, folder in sources.items():
            files = sorted(str(f.relative_to(folder)) for f in folder.glob("*") if f.suffix in (".toml", ".py", ".sh"))
            print(f"{name:15} {', '.join(files) or 'data files'}")
        print("\nmegatron-dppo examples NAME... --to DIR copies them")
        print(f"megatron-dppo examples NAME, alone, copies and runs one of {', '.join(RUNNABLE)}")
        return 0
    names = [RUNNABLE[name].files if name in RUNNABLE else name for name in options.name]
    unknown = [name for name in names if name not in sources]
    if unknown:
        raise ConfigError(f"there is no example {unknown[0]!r}; expected some of {', '.join(sources)}")
    targets = {
        name: Path(options.to) / (LAUNCH if name == LAUNCH else f"examples/{name}") for name in dict.fromkeys(names)
    }
    for target in targets.values():
        if target.exists() or target.is_symlink():
            raise ConfigError(f"{target} already exists; choose another folder by --to, or move it away")
    for name, target in targets.items():
        _copy(sources[name], target)
        print(target)
    return 0


def _run_example(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Copy the example's files unless they exist, and run it."""
    (name,) = options.name
    if options.processes is not None and options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: expected at least 1")
    from megatron_dppo.config.run import MAX_SEED

    if not 0 <= options.seed <= MAX_SEED:
        raise ConfigError(f"--seed {options.seed}: expected 0 to {MAX_SEED}")
    files = Path(options.to) / "examples" / RUNNABLE[name].files
    if not files.exists():
        _copy(shipped_folder("examples") / RUNNABLE[name].files, files)
    print(f"files    {files}: edit settings, data and reward there", flush=True)
    return run_example(
        name,
        files,
        output=options.output or Path("runs") / name,
        processes=options.processes,
        seed=options.seed,
        overrides=overrides,
    )


def _copy(source: Path, target: Path) -> None:
    """Copy a folder atomically."""
    with disk_errors(target, "the files"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            shutil.copytree(source, Path(folder) / target.name, ignore=_NOT_COPIED)
            (Path(folder) / target.name).rename(target)
