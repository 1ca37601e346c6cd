"""Check that a Hugging Face folder and Megatron's model of it are the same: names, shapes, bits, log-probabilities.

    torchrun --nproc-per-node 2 tools/check_conversion.py HF_FOLDER [--checkpoint CHECKPOINT] \
        --expert-model-parallel-size 2

Without --checkpoint the folder goes into Megatron and out again; with it, the checkpoint is compared with the folder.
Exit code 0 = the same, 1 = not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_dppo.commands.convert import conversion_parser, parallel_of, reporting_errors
from megatron_dppo.weights.conversion import open_converter

LOGPROB_BOUNDS = {"fp32": 1e-4, "bf16": 0.25}


@reporting_errors
def main() -> int:
    """Print each difference and a verdict."""
    parser = conversion_parser(__doc__)
    parser.add_argument("hf_folder")
    parser.add_argument("--checkpoint")
    options = parser.parse_args()
    with open_converter(options.hf_folder, parallel_of(options), options.dtype) as converter:
        if options.checkpoint is None:
            converter.load_hf()
        else:
            converter.load_megatron(Path(options.checkpoint))
        problems = converter.problems()
        error, bound = converter.logprob_error(), LOGPROB_BOUNDS[options.dtype]
    if error > bound:
        problems.append(f"log-probabilities differ from transformers by {error:.1e}, more than {bound:.0e}")
    print("\n".join(problems) or f"the same: every weight bit for bit, log-probabilities within {error:.1e}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
