"""Rollout engines: in process, SGLang, vLLM, and users' agents."""
