"""Starting inference servers: what they need, their processes, what vLLM loads."""

from pathlib import Path

VLLM_EXTENSION = Path(__file__).parent / "vllm_extension"
"""Folder that vLLM servers load; it imports vLLM, which the package itself does not."""
