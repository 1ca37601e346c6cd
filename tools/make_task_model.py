"""Write the model folder of an embedded task: config and tokenizer of a tiny Qwen3-MoE, no weights.

python tools/make_task_model.py chain_sum examples/chain_sum/model
python tools/make_task_model.py chain_sum examples/chain_sum/model_vllm 32    # vLLM's CPU attention has no heads of 16
python tools/make_task_model.py rare_words examples/rare_words/model
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_dppo.data.tasks import write_model_folder

if __name__ == "__main__":
    write_model_folder(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
