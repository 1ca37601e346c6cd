"""DPPO post-training of mixture-of-experts language models on Megatron Core.

What is listed here is for use inside other trainers, and stays as it is within a minor version. It needs torch and
pydantic alone, and is loaded when it is first asked for:

    import megatron_dppo as md

    output = md.dppo_loss(md.LossInputs(...), md.LossConfig(name="dppo_topk_tv"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dppo.advantages.group_relative import group_relative_advantages as group_relative_advantages
    from megatron_dppo.config.loss import LossConfig as LossConfig
    from megatron_dppo.head.loss import dppo_head_loss as dppo_head_loss
    from megatron_dppo.head.vocab_logprobs import vocab_parallel_logprobs as vocab_parallel_logprobs
    from megatron_dppo.head.vocab_topk import vocab_parallel_topk as vocab_parallel_topk
    from megatron_dppo.public import dppo_loss as dppo_loss
    from megatron_dppo.public import policy_loss as policy_loss
    from megatron_dppo.types import LossInputs as LossInputs
    from megatron_dppo.types import LossOutput as LossOutput
    from megatron_dppo.types import SamplingMask as SamplingMask
    from megatron_dppo.types import TokenTargets as TokenTargets

__version__ = "0.1.0"
_MODULES = {
    "SamplingMask": "types",
    "LossConfig": "config.loss",
    "LossInputs": "types",
    "LossOutput": "types",
    "TokenTargets": "types",
    "dppo_head_loss": "head.loss",
    "dppo_loss": "public",
    "group_relative_advantages": "advantages.group_relative",
    "policy_loss": "public",
    "vocab_parallel_logprobs": "head.vocab_logprobs",
    "vocab_parallel_topk": "head.vocab_topk",
}
__all__ = sorted(["__version__", *_MODULES])

_RENAMED = {"KeptSets": "SamplingMask"}
"""Names of earlier versions that still work."""


def __getattr__(name: str) -> Any:
    name = _RENAMED.get(name, name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
