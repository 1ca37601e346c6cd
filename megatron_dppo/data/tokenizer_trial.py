"""Trial of a folder's tokenizer and chat templates in a child process with limits of time and memory.

Both are programs of whoever wrote the folder. Without a limit, 40 normalizers that double a text, or three nested
loops, take minutes and gigabytes.
"""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from megatron_dppo.errors import CheckpointError

CPU_SECONDS = 30
"""Processor time of the child. The tokenizers of published models need 1 to 2 s."""
_MEMORY = 4 << 30
"""Address space of the child. Those tokenizers need less than 1 GiB."""
_MAX_CHARACTERS = 1 << 24
"""Longest text of a template for four short messages."""
CHILD = Path(__file__).with_name("tokenizer_trial_child.py")
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


def try_tokenizer(folder: Path) -> None:
    """Check that tokenizer and chat templates of a folder end within limits. A folder is tried once a process."""
    states = [(folder / name).stat() for name in _FILES if (folder / name).is_file()]
    _try_once(folder.resolve(), tuple((state.st_size, state.st_mtime_ns) for state in states), CPU_SECONDS)


@lru_cache(maxsize=16)
def _try_once(folder: Path, states: tuple[tuple[int, int], ...], cpu_seconds: int) -> None:
    del states  # they only tell files apart that have changed
    process = subprocess.run(
        # -P: the folder of the script holds modules of this package, which are not for import here.
        [sys.executable, "-P", str(CHILD), str(folder), *map(str, (_MAX_CHARACTERS, cpu_seconds, _MEMORY))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # One thread: each has memory of its own, which counts.
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    steps = process.stdout.split("\n")[:-1]
    if not steps or steps[-1] == "end":
        # Without a step, Python itself did not start: nothing is known of the folder.
        return
    raise CheckpointError(
        f"{steps[-1]} of {str(folder)!r} does not end within {cpu_seconds} s of processor time, {_MEMORY >> 30} GiB of "
        f"memory and {_MAX_CHARACTERS:,} characters for one line of text. Copy the tokenizer files again from a source "
        "that you trust"
    )
