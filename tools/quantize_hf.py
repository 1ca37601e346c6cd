"""A Hugging Face folder in FP8, or its experts in INT4, for servers (rollout.servers.model).

    python tools/quantize_hf.py IN_FOLDER OUT_FOLDER --format fp8

docs/precision.md says what the formats are. It is one pass over the weights on the CPU, at most one file of 5 GB in
memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_dppo.commands.convert import new_folder, quantized_format, reporting_errors
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo.weights.quantized_folder import quantize_folder


@reporting_errors
def main() -> int:
    """Quantise, then say where the folder is and how large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("in_folder")
    parser.add_argument("out_folder")
    parser.add_argument("--format", type=quantized_format, metavar="{fp8,int4}", required=True)
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16"), default="bf16", help="of what is not quantised; rollout.dtype of a run"
    )
    options = parser.parse_args()
    target = new_folder(options.out_folder)
    count = quantize_folder(Path(options.in_folder), target, options.format, DTYPES[options.dtype])
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    print(f"wrote {target}: {count} of its weights in {options.format}, {size / 1e9:.3g} GB in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
