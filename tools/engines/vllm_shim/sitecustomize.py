"""Python runs this at start-up because the folder is on PYTHONPATH: vLLM's models with images import torchvision.

Reason: ``vllm/model_executor/models/qwen3_5.py`` imports it for text models (Qwen3.5) too, and the package index has no
build of torchvision for the CPU build of torch.
Affected: vLLM 0.32.0. Delete when: Qwen3.5 starts without torchvision.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "sglang_shim"))
import sglang_cpu

sglang_cpu.install(["torchvision"], has_fixes=False)
