"""The process that tests fork theirs from: it has imported torch, Megatron and this package once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def preload() -> ForkServerContext:
    """A context whose processes begin with everything imported; importing takes each four to eight seconds."""
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    return multiprocessing.get_context("forkserver")
