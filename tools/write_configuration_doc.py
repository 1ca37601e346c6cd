"""Write docs/configuration.md from the configuration's own models, so that the two never differ.

python tools/write_configuration_doc.py docs/configuration.md
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path

from pydantic.fields import FieldInfo

from megatron_dppo.config.describe import is_section, limits, type_name
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_classes, user_loss_class
from megatron_dppo.config.schema import Config
from megatron_dppo.config.section import Section

HEAD = """# Configuration

One TOML file, one table a section. On the command line `--section.key VALUE` (or `--section.key=VALUE`) overrides any
key; Megatron's own flags work as they stand (`--tensor-model-parallel-size 2`, `--sequence-parallel`, `--lr 1e-6`,
`--recompute-granularity full`), and the value `null` takes a key of the file out. Unknown keys are errors. A relative
path of a model, of data or of `rollout.servers.command` is looked up next to the TOML file first.
`megatron-dppo help KEY` prints what this page says of a key, a section or a flag, and finds the names of other
frameworks.

`extends = "base.toml"` at the top of a file takes everything from another one, next to it, that the file does not say
itself: tables are joined key by key, anything else is replaced. Files may extend files that extend others. A run keeps
the joined configuration.

## Before the first step

`megatron-dppo train CONFIG.toml --dry-run` makes every check that a run makes before its first step, creates nothing,
and lists all problems in one message (exit code 2). Without problems it prints layout, batch sizes, data, the
checkpoint that a run would resume from, and the defaults that depend on other keys. `--verbose` adds the resolved
configuration. A run starts with the same list (`megatron_dppo/run/preflight.py`). `--world-size N` checks the layout
for N processes; without it and without WORLD_SIZE, for the fewest that the layout can have.

- the file and the flags: unknown keys, wrong values, combinations; `model.transformer` against the names and types of
  Megatron's TransformerConfig, which is then built for the model and the layout
- the model folder: configuration, tokenizer, every weight by the headers of its files (missing, cut off, of another
  shape)
- all data files, row by row, against chat template, prompt length and context; the warm-up's too
- layout and batch sizes for the number of processes; CUDA devices for the processes of this machine
- the reward and generate functions load, and their signatures are known
- the output folder can be created and written; its file system has room for the checkpoints that are kept, the
  warmed-up and the exported model; an earlier checkpoint there belongs to this run
- TensorBoard and Weights & Biases are installed, and there is a key for the latter; API keys of servers are set
- each server is healthy, is the engine that `rollout.engine` says, is new enough, takes the longest prompt and
  response, and was started with the flags that can be seen from outside. A run starts when at least one server
  passes, a dry run names every one that does not

Where a value is wrong, checks that depend on its section are left out and named: what they would say would be about
the default.
"""


NO_KEYS = "\nNo further keys.\n"


def row(name: str, field: FieldInfo) -> str:
    """One line of a section's table."""
    default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)}`"
    within = limits(field)
    text = (field.description or "").replace("\n", " ").replace("|", "\\|").replace("``", "`")
    kind = type_name(field.annotation) + (f" ({within})" if within else "")
    return f"| `{name}` | {kind} | {default} | {text} |"


def section(name: str, model: type[Section]) -> str:
    """The table of one section, and those of the sections inside it."""
    plain, nested = [], []
    for key, field in model.model_fields.items():
        if is_section(field.annotation):
            nested.append(section(f"{name}.{key}" if name else key, field.annotation))
        elif (inner := typing.get_args(field.annotation)[1:]) and is_section(inner[0]):
            plain.append(row(key, field))
            nested.append(section(f"{name}.{key}.NAME", inner[0]))
        else:
            plain.append(row(key, field))
    about = (model.__doc__ or "").partition("\n\n    Example:")[0].strip().replace("``", "`")
    head = f"\n## [{name}]\n\n{about}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
    of_losses = keys_of_losses() if model is LossConfig else ""
    return (head + "\n".join(plain) + "\n" if plain else "") + of_losses + "".join(nested)


def keys_of_losses() -> str:
    """Return the tables of the keys that only some losses have, one for each class of losses."""
    names: dict[type[LossConfig], list[str]] = {}
    for name, kind in loss_classes().items():
        names.setdefault(kind, []).append(f"`{name}`")
    names[user_loss_class()] = ["A function of your own"]
    text = ""
    for kind, of_kind in names.items():
        rows = [row(key, field) for key, field in kind.model_fields.items() if key not in LossConfig.model_fields]
        table = "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        text += f"\n### [loss], {', '.join(of_kind)}\n{table if rows else NO_KEYS}"
    return text


def document() -> str:
    """The whole page."""
    return HEAD + section("", Config)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
