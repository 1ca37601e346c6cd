"""vLLM over HTTP (0.32 tested); nothing of it is imported."""

from megatron_dppo.engines.vllm.client import VLLMServer

__all__ = ["VLLMServer"]
