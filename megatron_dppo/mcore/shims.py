"""Megatron Core on this process's device: the shims of ``megatron_dppo_megatron_cpu``, and one of the trainer."""

from collections.abc import Sequence

from megatron_dppo.errors import UserError
from megatron_dppo.mcore.extensions import replace_load_inline
from megatron_dppo.mcore.transformer_engine import has_transformer_engine
from megatron_dppo.parallel.platform import Platform
from megatron_dppo_megatron_cpu import shims
from megatron_dppo_megatron_cpu.shims import PACKAGES, Shim

_BUILDS = Shim(
    replace_load_inline,
    "selective recomputation compiles an extension behind torch's lock file, for which a run waits forever after "
    "another one was killed (see extensions.py)",
    "0.17.0 to 0.19.2",
    "Megatron restores outputs without a C++ extension",
    on_cuda=True,
    with_te=True,
)


def apply_shims(platform: Platform, packages: Sequence[str] = PACKAGES) -> bool:
    """Apply the shims that this platform needs, before anything imports ``megatron.core``.

    Returns True if this call applied them; a second call does nothing. The modules of ``packages`` (dotted prefixes)
    get the CPU proxy of torch.
    """
    try:
        return shims.apply_shims(
            is_cuda=platform.is_cuda,
            has_te=platform.is_cuda and has_transformer_engine(),
            packages=packages,
            more=[_BUILDS],
        )
    except shims.UnsupportedMegatronError as error:
        raise UserError(str(error)) from error
