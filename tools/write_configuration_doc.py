"""Write docs/configuration.md from the configuration's own models, so that the two never differ.

python tools/write_configuration_doc.py docs/configuration.md
"""

from __future__ import annotations

import argparse
import inspect
import typing
from pathlib import Path

from pydantic.fields import FieldInfo

from megatron_dppo.config.describe import is_section, limits, toml_value, type_name
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_classes, user_loss_class
from megatron_dppo.config.schema import Config
from megatron_dppo.config.section import Section

HEAD = """# Configuration

You configure a run with one TOML file. Each section of this page is a table of that file. This one changes three keys
of another file:

```toml
extends = "examples/chain_sum/dppo.toml"

[loss]
divergence_threshold_high = 0.2

[optimizer]
lr = 1e-5

[run]
output_dir = "runs/wider"
```

| to | write |
|---|---|
| set a key | `key = value` in the table of its section |
| override a key on the command line | `--section.key VALUE` or `--section.key=VALUE` |
| use a flag of Megatron | the flag itself: `--tensor-model-parallel-size 2`, `--sequence-parallel`, `--lr 1e-6` |
| return a key to its default | remove it, or `--section.key null` |
| read the description of a key | `megatron-dppo help KEY`; it also accepts names of other frameworks |
| check a file without a run | `megatron-dppo train CONFIG.toml --dry-run` |

`null` in this page means that the key is not set. An unknown key is an error. A relative path of a model, of data or
of a program is looked up in the folder of the TOML file first, then in your working directory. `run.output_dir` starts
at the working directory.

`extends = "base.toml"` at the top of a file reads another file first. Tables are merged key by key, and other values
are replaced. An extended file may extend a further one. A run stores the merged configuration.

## Before the first step

`megatron-dppo train CONFIG.toml --dry-run` makes every check that a run makes before its first step. It creates
nothing. It prints about 30 lines:

- layout and batch sizes, number of parameters
- when the run saves, and the disk space that its checkpoints take
- data, passes over the prompts, a prompt as the model sees it, prompts of `data.eval` that are also in `data.train`
- the reward of one made-up answer: the label in a box. Functions that send requests are not called
- the checkpoint that a run would resume from
- the value in effect of each default that depends on other keys
- with `--verbose`: the resolved configuration

If something is wrong, every problem follows in one message, and the exit code is 2. Layout and batch sizes are printed
first.

A run starts with the same checks (`megatron_dppo/setup/preflight.py`). `--world-size N` checks the layout for N
processes. Without it and without WORLD_SIZE, the smallest number that the layout allows is checked.

The checks are:

- File and flags: unknown keys, wrong values, incompatible values. `model.transformer` must match the names and types
  of Megatron's TransformerConfig, which is then built for the model and the layout.
- Model folder: configuration, tokenizer (no token without an embedding), and every weight by the headers of its files
  (missing, truncated, or of a wrong shape). On a machine without GPU a dry run also builds the model with Megatron,
  without memory.
- Data: every row of all files, against chat template, prompt length and context length.
- Layout: batch sizes for the number of processes, and CUDA devices for the processes of this machine.
- User functions: reward and generate functions load, and their signatures are known. A loss of your own must make a
  response with a positive advantage more likely.
- Output folder: it can be created and written, has space for checkpoints and exported models, and an earlier checkpoint
  in it belongs to this run. For more processes than this machine has devices, a dry run warns of too little space.
- Trackers: TensorBoard and Weights & Biases are installed, with an API key for the latter. API keys of servers are set.
- Servers: each is healthy, runs the engine in `rollout.engine`, is new enough, accepts the longest prompt and response,
  and has the required flags as far as they can be seen from outside. A run starts if at least one server passes. A dry
  run names each server that does not. A server that is not running yet is a note.

If a value is wrong, the checks that depend on its section are skipped and named, because they would check the default.
"""


NO_KEYS = "\nNo further keys.\n"


def row(name: str, field: FieldInfo) -> str:
    """Return one line of a section's table."""
    default = "required" if field.is_required() else f"`{toml_value(field.get_default(call_default_factory=True))}`"
    within = limits(field)
    text = (field.description or "").replace("\n", " ").replace("|", "\\|").replace("``", "`")
    kind = type_name(field.annotation) + (f" ({within})" if within else "")
    return f"| `{name}` | {kind} | {default} | {text} |"


def section(name: str, model: type[Section]) -> str:
    """Return the table of one section, and the tables of the sections inside it."""
    plain, nested = [], []
    for key, field in model.model_fields.items():
        if is_section(field.annotation):
            nested.append(section(f"{name}.{key}" if name else key, field.annotation))
        elif (inner := typing.get_args(field.annotation)[1:]) and is_section(inner[0]):
            plain.append(row(key, field))
            nested.append(section(f"{name}.{key}.NAME", inner[0]))
        else:
            plain.append(row(key, field))
    about = inspect.cleandoc(model.__doc__ or "").partition("\n\nExample:")[0].replace("``", "`")
    head = f"\n## [{name}]\n\n{about}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
    loss_tables = write_loss_tables() if model is LossConfig else ""
    return (head + "\n".join(plain) + "\n" if plain else "") + loss_tables + "".join(nested)


def write_loss_tables() -> str:
    """Return the tables of the keys that only some losses have, one for each class of losses."""
    names: dict[type[LossConfig], list[str]] = {}
    for name, kind in loss_classes().items():
        names.setdefault(kind, []).append(f"`{name}`")
    names[user_loss_class()] = ["A user function"]
    text = ""
    for kind, of_kind in names.items():
        rows = [row(key, field) for key, field in kind.model_fields.items() if key not in LossConfig.model_fields]
        table = "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        text += f"\n### [loss], {', '.join(of_kind)}\n{table if rows else NO_KEYS}"
    return text


def document() -> str:
    """Return the whole page."""
    return HEAD + section("", Config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.parse_args().page.write_text(document(), encoding="utf-8")
