"""A dense Hugging Face folder upcycled to a mixture of experts; see docs/checkpoints.md.

python tools/convert_upcycle.py DENSE OUT --experts 4 --top-k 2 --noise 0.02
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_dppo.commands.convert import reporting_errors
from megatron_dppo.weights.upcycled_config import Upcycling
from megatron_dppo.weights.upcycling import upcycle_folder


@reporting_errors
def main() -> int:
    """Upcycle, then print where the folder is and how many parameters it has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("dense", type=Path, help="folder of a llama, mistral, qwen2 or qwen3 model")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--experts", type=int, required=True, help="experts of every layer, at least 2")
    parser.add_argument("--top-k", type=int, required=True, help="experts that each token passes through")
    parser.add_argument(
        "--noise", type=float, required=True, help="noise on every expert, in standard deviations of each weight"
    )
    parser.add_argument("--seed", type=int, default=0, help="of noise and routers (0)")
    options = parser.parse_args()
    settings = Upcycling(num_experts=options.experts, top_k=options.top_k, noise=options.noise, seed=options.seed)
    model = upcycle_folder(options.dense, options.out, settings)
    print(f"parameters: {model.parameters_before:,} before, {model.parameters_after:,} after")
    print(f"wrote {options.out} ({model.model_type}, {settings.num_experts} experts, top-k {settings.top_k})")
    if settings.top_k == 1:
        print("note: with top-k 1 the weight of an expert is always 1: routers learn nothing, and Megatron refuses it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
