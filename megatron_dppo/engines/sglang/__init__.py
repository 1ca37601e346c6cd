"""SGLang over HTTP (0.5.20 to 0.5.23 tested); nothing of it is imported."""

from megatron_dppo.engines.sglang.client import SGLangServer

__all__ = ["SGLangServer"]
