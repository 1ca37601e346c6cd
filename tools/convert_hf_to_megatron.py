"""A Hugging Face folder to a Megatron torch_dist checkpoint (weights only).

torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py HF_FOLDER OUT_FOLDER --expert-model-parallel-size 8
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_dppo.commands.convert import conversion_parser, parallel_of, reporting_errors
from megatron_dppo.weights.conversion import open_converter


@reporting_errors
def main() -> int:
    """Convert, then say where the checkpoint is."""
    parser = conversion_parser(__doc__)
    parser.add_argument("hf_folder")
    parser.add_argument("out_folder")
    options = parser.parse_args()
    with open_converter(options.hf_folder, parallel_of(options), options.dtype) as converter:
        converter.load_hf()
        converter.save_megatron(Path(options.out_folder))
        print(f"wrote {options.out_folder} ({converter.layout})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
