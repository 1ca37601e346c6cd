"""Python runs this at start-up because the folder is on PYTHONPATH: two fixes for vLLM without a GPU.

1. vLLM's models with images import torchvision.

Reason: ``vllm/model_executor/models/qwen3_5.py`` imports it for text models (Qwen3.5) too, and the package index has no
build of torchvision for the CPU build of torch.
Affected: vLLM 0.32.0. Delete when: Qwen3.5 starts without torchvision.

2. On CPUs with AMX small linear layers compute with a packed copy of their weights, and keep their biases in fp32.

Reason: an update of the weights does not reach the copy, and the digests of such biases are not those that were sent.
Affected: vLLM 0.32.0 on CPUs with AMX, in bf16. Delete when: an update of the weights reaches these layers.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "sglang_shim"))
import sglang_cpu

sglang_cpu.install(["torchvision"], has_fixes=False)


def _keep_weights_as_they_are(module: Any) -> None:
    module.check_cpu_sgl_kernel = lambda *_: False


sglang_cpu.fix_after_import("vllm.model_executor.layers.utils", _keep_weights_as_they_are)
