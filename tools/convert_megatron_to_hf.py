"""A Megatron torch_dist checkpoint of any layout, converted or from training, to a Hugging Face folder.

    torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py CHECKPOINT HF_FOLDER OUT_FOLDER \
        --expert-model-parallel-size 8 [--quantize fp8]

HF_FOLDER gives config.json and the tokenizer; its weights are read for a checkpoint of adapters alone (docs/lora.md).
docs/precision.md says what the quantised formats are.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_dppo.commands.convert import (
    conversion_parser,
    new_folder,
    parallel_of,
    quantized_format,
    reporting_errors,
)
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo.weights.conversion import open_converter
from megatron_dppo.weights.quantization import Quantization


@reporting_errors
def main() -> int:
    """Convert, then say where the folder is."""
    parser = conversion_parser(__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("hf_folder")
    parser.add_argument("out_folder")
    parser.add_argument(
        "--quantize",
        type=quantized_format,
        metavar="{fp8,int4}",
        help="of the weights after they were rounded to --dtype",
    )
    options = parser.parse_args()
    target = new_folder(options.out_folder)
    quantization = Quantization(options.quantize) if options.quantize else None
    with open_converter(options.hf_folder, parallel_of(options), options.dtype) as converter:
        converter.load_megatron(Path(options.checkpoint))
        converter.save_hf(target, DTYPES[options.dtype], quantization)
    print(f"wrote {options.out_folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
