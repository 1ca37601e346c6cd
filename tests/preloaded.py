"""Imports of the server that forks the processes of ``warm.py``; none of them starts a thread."""

from __future__ import annotations

import gc
import os

from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform
from megatron_dppo_megatron_cpu.shims import PACKAGES

os.environ.setdefault("OMP_NUM_THREADS", "1")
apply_shims(Platform.detect(force_cpu=True), packages=(*PACKAGES, "mbridge"))

import megatron_dppo.mcore.setup  # noqa: E402
import megatron_dppo.policy.trainer  # noqa: E402
import megatron_dppo.run.loop  # noqa: E402
import megatron_dppo.weights.publish  # noqa: E402, F401
from megatron_dppo.config.loss_registry import loss_classes  # noqa: E402
from megatron_dppo.hf.folder import preload_models  # noqa: E402

preload_models()
loss_classes()

# A collection of garbage in a fork (each checkpoint makes one) passes over what was imported, and copies no page of it.
gc.freeze()
