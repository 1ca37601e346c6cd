"""A Megatron torch_dist checkpoint of any layout, converted or from training, to a Hugging Face folder.

    torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py CHECKPOINT HF_FOLDER OUT_FOLDER \
        --expert-model-parallel-size 8 [--quantize fp8]

HF_FOLDER gives config.json and the tokenizer; its weights are read for a checkpoint of adapters alone (docs/lora.md).
docs/precision.md says what the quantised formats are.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from megatron_dppo.cli.convert import (
    QUANTIZED,
    add_calibration,
    check_calibration,
    conversion_parser,
    new_folder,
    parallel_of,
    reporting_errors,
)
from megatron_dppo.platform import DTYPES
from megatron_dppo.weights.awq import quantize_awq
from megatron_dppo.weights.conversion import open_converter
from megatron_dppo.weights.quantization import FORMATS, Quantization


@reporting_errors
def main() -> int:
    """Convert, then say where the folder is."""
    parser = conversion_parser(__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("hf_folder")
    parser.add_argument("out_folder")
    parser.add_argument("--quantize", choices=QUANTIZED, help="of the weights after they were rounded to --dtype")
    add_calibration(parser)
    options = parser.parse_args()
    target = new_folder(options.out_folder)
    by_awq = check_calibration(options.quantize, options.calibration)
    written = new_folder(f"{target}.unquantized") if by_awq else target
    quantization = Quantization(options.quantize) if options.quantize in FORMATS else None
    with open_converter(options.hf_folder, parallel_of(options), options.dtype) as converter:
        converter.load_megatron(Path(options.checkpoint))
        converter.save_hf(written, DTYPES[options.dtype], quantization)
    if by_awq and os.environ.get("RANK", "0") == "0":
        quantize_awq(written, target, Path(options.calibration))
        shutil.rmtree(written)
    print(f"wrote {options.out_folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
