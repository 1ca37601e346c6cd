"""Starting inference servers: what they need, their processes, what vLLM loads."""

from pathlib import Path
from typing import Literal

VLLM_EXTENSION = Path(__file__).parent / "vllm_extension"
"""Folder that vLLM servers load; it imports vLLM, which the package itself does not."""
WeightSyncMethod = Literal["distributed", "ipc", "disk", "adapter"]
"""Transport of new weights to a server."""
