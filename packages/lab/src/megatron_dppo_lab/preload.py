"""Imports of a process that forks runs on a CPU. None of them starts a thread."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform

apply_shims(Platform.detect(force_cpu=True))

import megatron_dppo.mcore.setup  # noqa: E402
import megatron_dppo.policy.trainer  # noqa: E402
import megatron_dppo.run.loop  # noqa: E402
import megatron_dppo.weights.publish  # noqa: E402, F401
from megatron_dppo.config.loss_registry import loss_classes  # noqa: E402
from megatron_dppo.hf.folder import preload_models  # noqa: E402

preload_models()
# Builds the configuration classes of all losses, which takes half a second in each run.
loss_classes()
