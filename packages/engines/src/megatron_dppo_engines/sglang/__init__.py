"""Client of SGLang over HTTP (0.5.20 to 0.5.23 tested); imports nothing of SGLang."""

from megatron_dppo_engines.sglang.client import SGLangServer

__all__ = ["SGLangServer"]
