"""Write the model folder of an embedded task: config and tokenizer of a tiny Qwen3-MoE, no weights.

python tools/make_task_model.py chain_sum examples/chain_sum/model
python tools/make_task_model.py chain_sum examples/chain_sum/model_vllm 32    # vLLM's CPU attention has no heads of 16
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_dppo_lab.embedded_tasks import write_model_folder

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("folder", type=Path)
    parser.add_argument("head_dim", type=int, nargs="?", default=16)
    args = parser.parse_args()
    write_model_folder(args.task, args.folder, args.head_dim)
