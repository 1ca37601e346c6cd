"""Client of vLLM over HTTP (0.32 tested); imports nothing of vLLM."""

from megatron_dppo_engines.vllm.client import VLLMServer

__all__ = ["VLLMServer"]
