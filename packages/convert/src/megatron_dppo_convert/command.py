"""``megatron-dppo convert NAME``: convert weights between Hugging Face and Megatron.

Large models are converted under torchrun, split over its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_dppo.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from megatron_dppo.config.model import ParallelConfig
    from megatron_dppo.export.quantization import Format

HELP = "convert weights: Hugging Face, Megatron, adapters, mixtures of experts, FP8"
HAS_OVERRIDES = False

_TORCHRUN = "torchrun --nproc-per-node {} -m megatron_dppo.commands.main convert"
_SIZE_KEYS = [f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")]
_LOGPROB_BOUNDS = {"fp32": 1e-4, "bf16": 0.25}
"""Largest allowed difference of log-probabilities to transformers, in nats, by dtype."""


class _Conversion(NamedTuple):
    description: str
    """Summary in the first line, then an example and details."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Function that returns the exit code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the conversions with their arguments."""
    conversions = parser.add_subparsers(dest="conversion", required=True, help="NAME --help lists its arguments")
    as_written = argparse.RawDescriptionHelpFormatter
    for name, (description, add_to, _) in CONVERSIONS.items():
        add_to(conversions.add_parser(name, description=description, formatter_class=as_written, allow_abbrev=False))


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run one conversion; only rank 0 prints. Return 1 if ``check`` finds a difference, else 0."""
    if overrides:
        raise ConfigError(
            f"unexpected argument {overrides[0]!r}; see megatron-dppo convert {options.conversion} --help"
        )
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    # The other ranks run the same code, collectives included, and print to nowhere.
    with contextlib.nullcontext() if is_rank_0 else contextlib.redirect_stdout(io.StringIO()):
        return CONVERSIONS[options.conversion].run(options)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Add Megatron's flags of the layout, and the dtype of the weights."""
    for name in _SIZE_KEYS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16")


def _layout(options: argparse.Namespace) -> ParallelConfig:
    sizes = {name: value for name in _SIZE_KEYS if (value := getattr(options, name)) is not None}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected a number of ranks, at least 1")
    from megatron_dppo.config.model import ParallelConfig

    return ParallelConfig(**sizes)


def _new_folder(path: str) -> Path:
    if Path(path).exists():
        raise CheckpointError(f"{path} already exists; choose another folder or delete it")
    return Path(path)


def quantized_format(text: str) -> Format:
    """Parse the value of ``--format`` or ``--quantize``. Of a removed format the error names the replacement."""
    from megatron_dppo.export.quantization import FORMATS

    if text in FORMATS:
        return text
    if text == "int4_awq":
        raise argparse.ArgumentTypeError(
            "int4_awq was removed. Fix: export without it, then run NVIDIA ModelOpt's hf_ptq.py --qformat int4_awq on "
            "the folder (docs/precision.md, Calibrated formats)"
        )
    raise argparse.ArgumentTypeError(f"expected {' or '.join(FORMATS)}, got {text!r}")


def _add_hf_to_megatron(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    parser.add_argument("hf_folder")
    parser.add_argument("out_folder")


def _hf_to_megatron(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from megatron_dppo.run.conversion import open_converter

    with open_converter(options.hf_folder, _layout(options), options.dtype) as converter:
        # Its import needs the shims, which the converter applies.
        from megatron_dppo.mcore.checkpoint.save_load import save_model

        converter.load_hf()
        target = _new_folder(options.out_folder)
        # No rank may create the folder before every rank has looked for it.
        dist.barrier()
        text = json.dumps({"hf_folder": str(converter.hf_folder), "layout": str(converter.layout)}, indent=2)
        save_model(target, converter.models, {"conversion.json": text + "\n"})
        print(f"wrote {options.out_folder} ({converter.layout})")
    return 0


def _add_megatron_to_hf(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    parser.add_argument("checkpoint")
    parser.add_argument("hf_folder")
    parser.add_argument("out_folder")
    parser.add_argument(
        "--quantize",
        type=quantized_format,
        metavar="{fp8,int4}",
        help="quantize the weights after rounding them to --dtype",
    )


def _megatron_to_hf(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from megatron_dppo.export.hf_folder import save_hf_folder
    from megatron_dppo.export.quantization import Quantization
    from megatron_dppo.parallel.platform import DTYPES
    from megatron_dppo.run.conversion import open_converter

    target = _new_folder(options.out_folder)
    quantization = Quantization(options.quantize) if options.quantize else None
    with open_converter(options.hf_folder, _layout(options), options.dtype) as converter:
        converter.load_megatron(Path(options.checkpoint))
        # Each rank writes some of the files.
        weights, dtype = converter.export(), DTYPES[options.dtype]
        save_hf_folder(target, converter.hf_folder, weights, dtype, group=dist.group.WORLD, quantization=quantization)
    print(f"wrote {options.out_folder}")
    return 0


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path)
    parser.add_argument("out", type=Path)


def _adapter(options: argparse.Namespace) -> int:
    from megatron_dppo_convert.fused_adapter import fuse_adapter

    fuse_adapter(options.adapter, _new_folder(options.out))
    print(f"wrote {options.out}")
    return 0


def _add_upcycle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dense", type=Path, help="folder of a llama, mistral, qwen2 or qwen3 model")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--experts", type=int, required=True, help="number of experts in each layer, at least 2")
    parser.add_argument("--top-k", type=int, required=True, help="number of experts for each token")
    parser.add_argument(
        "--noise", type=float, required=True, help="noise added to each expert, in standard deviations of each weight"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and routers (default 0)")


def _upcycle(options: argparse.Namespace) -> int:
    from megatron_dppo_convert.upcycled_config import Upcycling
    from megatron_dppo_convert.upcycling import upcycle_folder

    settings = Upcycling(num_experts=options.experts, top_k=options.top_k, noise=options.noise, seed=options.seed)
    model = upcycle_folder(options.dense, options.out, settings)
    print(f"parameters: {model.parameters_before:,} before, {model.parameters_after:,} after")
    print(f"wrote {options.out} ({model.model_type}, {settings.num_experts} experts, top-k {settings.top_k})")
    if settings.top_k == 1:
        print("note: with top-k 1 an expert's weight is always 1: routers do not learn, and Megatron rejects the model")
    return 0


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("in_folder")
    parser.add_argument("out_folder")
    parser.add_argument("--format", type=quantized_format, metavar="{fp8,int4}", required=True)
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16"),
        default="bf16",
        help="dtype of the weights that stay unquantized; rollout.dtype of a run",
    )


def _quantize(options: argparse.Namespace) -> int:
    from megatron_dppo.parallel.platform import DTYPES
    from megatron_dppo_convert.quantized_folder import quantize_folder

    target = _new_folder(options.out_folder)
    count = quantize_folder(Path(options.in_folder), target, options.format, DTYPES[options.dtype])
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    print(f"wrote {target}: {count} weights in {options.format}, {size / 1e9:.3g} GB in total")
    return 0


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    parser.add_argument("hf_folder")
    parser.add_argument("--checkpoint")


def _check(options: argparse.Namespace) -> int:
    from megatron_dppo.run.conversion import open_converter
    from megatron_dppo_convert.comparison import find_differences, measure_logprob_error

    with open_converter(options.hf_folder, _layout(options), options.dtype) as converter:
        if options.checkpoint is None:
            converter.load_hf()
        else:
            converter.load_megatron(Path(options.checkpoint))
        problems = find_differences(converter)
        error = measure_logprob_error(converter)
    bound = _LOGPROB_BOUNDS[options.dtype]
    if error > bound:
        problems.append(f"log-probabilities differ from transformers by {error:.1e}, more than {bound:.0e}")
    print("\n".join(problems) or f"the same: every weight bit for bit, log-probabilities within {error:.1e}")
    return 1 if problems else 0


CONVERSIONS: Mapping[str, _Conversion] = {
    "hf-to-megatron": _Conversion(
        f"""A Hugging Face folder to a Megatron torch_dist checkpoint (weights only).

{_TORCHRUN.format(8)} hf-to-megatron HF_FOLDER OUT_FOLDER \\
    --expert-model-parallel-size 8
""",
        _add_hf_to_megatron,
        _hf_to_megatron,
    ),
    "megatron-to-hf": _Conversion(
        f"""A Megatron torch_dist checkpoint of any layout, converted or from training, to a Hugging Face folder.

{_TORCHRUN.format(8)} megatron-to-hf CHECKPOINT HF_FOLDER OUT_FOLDER \\
    --expert-model-parallel-size 8 [--quantize fp8]

config.json and the tokenizer come from HF_FOLDER; its weights are read only for a checkpoint of adapters
(docs/lora.md). docs/precision.md describes the quantized formats.
""",
        _add_megatron_to_hf,
        _megatron_to_hf,
    ),
    "adapter": _Conversion(
        """A run's adapters (RUN/hf-adapter) in the layout of PEFT 0.18 with transformers 5; see docs/lora.md.

megatron-dppo convert adapter RUN/hf-adapter OUT
""",
        _add_adapter,
        _adapter,
    ),
    "upcycle": _Conversion(
        """A dense Hugging Face folder upcycled to a mixture of experts; see docs/checkpoints.md.

megatron-dppo convert upcycle DENSE OUT --experts 4 --top-k 2 --noise 0.02
""",
        _add_upcycle,
        _upcycle,
    ),
    "quantize": _Conversion(
        """A Hugging Face folder in FP8, or its experts in INT4, for servers (rollout.servers.model).

megatron-dppo convert quantize IN_FOLDER OUT_FOLDER --format fp8

docs/precision.md describes the formats. Makes one pass over the weights on the CPU, with at most one file of 5 GB in
memory.
""",
        _add_quantize,
        _quantize,
    ),
    "check": _Conversion(
        f"""Check that a Hugging Face folder and its Megatron model are the same: names, shapes, bits, log-probs.

{_TORCHRUN.format(2)} check HF_FOLDER [--checkpoint CHECKPOINT] \\
    --expert-model-parallel-size 2

Without --checkpoint, converts the folder to Megatron and back; with it, compares the checkpoint with the folder.
Exit code 0 = the same, 1 = different.
""",
        _add_check,
        _check,
    ),
}
