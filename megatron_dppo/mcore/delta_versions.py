"""Versions with which flash-linear-attention's kernels are wrong.

Reason: on Hopper (compute capability 9) Triton miscompiles the gradient of the gated delta rule; the package raises a
RuntimeError in the first backward pass. Affected: Triton 3.4.0 to 3.7.0 (flash-linear-attention, issue 640), without
tilelang, which it then uses instead. Delete when no supported torch brings one of these.
"""

import re

FIX = "pip install tilelang, or pip install 'torch>=2.13', which brings Triton 3.7.1"
"""Torch requires one version of Triton, so a newer Triton needs a newer torch."""


def miscompiles_delta_rule(triton: str, capability: tuple[int, int], *, has_tilelang: bool) -> bool:
    """Return True if Triton's kernels of the delta rule have a wrong gradient on this device.

    Example:
        >>> miscompiles_delta_rule("3.6.0", (9, 0), has_tilelang=False)
        True
        >>> miscompiles_delta_rule("3.7.1", (9, 0), has_tilelang=False)
        False
    """
    numbers = re.findall(r"\d+", triton)[:3]
    version = tuple(map(int, numbers))
    return capability[0] == 9 and (3, 4, 0) <= version < (3, 7, 1) and not has_tilelang
