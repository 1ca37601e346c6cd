"""Megatron's shims, applied before any test of this process imports Megatron."""

from __future__ import annotations

from megatron_dppo.mcore.shims import apply_shims
from megatron_dppo.parallel.platform import Platform

apply_shims(Platform.detect(force_cpu=True))
