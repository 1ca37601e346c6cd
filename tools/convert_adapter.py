"""A run's adapters (RUN/hf-adapter) in the layout of PEFT 0.18 with transformers 5; see docs/lora.md.

python tools/convert_adapter.py RUN/hf-adapter OUT
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from safetensors.torch import load_file

from megatron_dppo.commands.convert import reporting_errors
from megatron_dppo.errors import CheckpointError
from megatron_dppo.weights.adapter_folder import fused_experts, write_adapter


@reporting_errors
def main() -> int:
    """Convert, then say where the folder is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    if not (options.adapter / "adapter_model.safetensors").is_file():
        raise CheckpointError(f"{options.adapter} has no adapter_model.safetensors; name the hf-adapter/ of a run")
    if options.out.exists():
        raise CheckpointError(f"{options.out} already exists; choose another folder or delete it")
    config = json.loads((options.adapter / "adapter_config.json").read_text())
    write_adapter(options.out, *fused_experts(load_file(options.adapter / "adapter_model.safetensors"), config))
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
