"""Shims that make Megatron Core run on CPU and correctly on CUDA, and the check of its version.

``apply_shims`` is called once at start-up, before anything imports ``megatron.core``. On CUDA it applies only a few of
them, most of these only without Transformer Engine. ``SHIMS`` lists every shim with its reason, the affected versions,
and when to delete it.
"""

import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dppo_megatron_cpu.dispatcher import release_routes
from megatron_dppo_megatron_cpu.fused_adam import FusedAdam
from megatron_dppo_megatron_cpu.gloo import silence_megatron, skip_single_rank_collectives, support_uneven_splits
from megatron_dppo_megatron_cpu.offload import accept_fp32_weights, copy_shards_only, copy_without_cuda
from megatron_dppo_megatron_cpu.torch_proxy import bind_proxy, cuda_type_names

PACKAGES = ("megatron.core", "megatron.bridge")
"""Packages whose modules get the CPU proxy of torch."""
OLDEST, NEWEST_EXCLUSIVE = (0, 16, 1), (0, 20, 0)
_applied = False


class UnsupportedMegatronError(Exception):
    """Megatron Core is missing, or of a version that the shims do not know."""


@dataclass(frozen=True)
class Shim:
    """One change of Megatron's behavior, applied on CPU."""

    apply: Callable[[], None]
    reason: str
    versions: str
    """Affected versions of megatron-core."""
    delete_when: str
    on_cuda: bool = False
    """True if it is also needed on CUDA without Transformer Engine."""
    with_te: bool = False
    """True if it is also needed on CUDA with Transformer Engine."""


def megatron_version() -> tuple[int, ...]:
    """Return the installed version of megatron-core, for example ``(0, 16, 1)``.

    Raises:
        UnsupportedMegatronError: It is not installed, or outside the supported range.
    """
    expected = "megatron-core >= 0.16.1, < 0.20"
    try:
        text = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnsupportedMegatronError(
            f"megatron-core is not installed; expected {expected}: pip install megatron-core"
        ) from error
    version = tuple(int(part) for part in text.split("+")[0].split("rc")[0].split(".")[:3] if part.isdigit())
    if not OLDEST <= version < NEWEST_EXCLUSIVE:
        raise UnsupportedMegatronError(f"megatron-core {text} is installed; expected {expected}")
    return version


def apply_shims(
    *, is_cuda: bool, has_te: bool = False, packages: Sequence[str] = PACKAGES, more: Sequence[Shim] = ()
) -> bool:
    """Apply the shims that this device needs; a second call does nothing.

    Args:
        is_cuda: False to run Megatron on the CPU.
        has_te: True if Transformer Engine works here. Read on CUDA alone.
        packages: Dotted prefixes of the packages whose modules get the CPU proxy of torch.
        more: Shims of the caller, applied like those of ``SHIMS``.

    Returns:
        True if this call applied the shims.

    Raises:
        UnsupportedMegatronError: megatron-core is missing or unsupported.
        RuntimeError: ``megatron.core`` was imported before, on CPU. Its functions are then bound to the real torch.
    """
    global _applied
    megatron_version()
    if _applied:
        return False
    silence_megatron()
    shims: Sequence[Shim] = [*SHIMS, *more]
    if is_cuda:
        shims = [shim for shim in shims if (shim.with_te if has_te else shim.on_cuda)]
    else:
        if "megatron.core" in sys.modules:
            raise RuntimeError("apply_shims must run before anything imports megatron.core")
        bind_proxy(packages)
    for shim in shims:
        shim.apply()
    _applied = True
    return True


def _ignore_tensor_cuda() -> None:
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]


def _use_cpu_rng_tracker() -> None:
    from megatron.core.tensor_parallel import random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """Megatron's tracker of random states on the CPU generator."""

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"Expected one of the random states {sorted(self.states_)}, got {name!r}.")
            outer_state = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer_state)

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random.CudaRNGStatesTracker = CpuRNGStatesTracker


def _define_te_general_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _convert_splits_on_cpu() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _use_cuda_type_names_in_optimizer() -> None:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    for cls in (distrib_optimizer.DistributedOptimizer, optimizer.Float16OptimizerWithFloat16Params):
        cls.__init__ = cuda_type_names()(cls.__init__)
    clip = cuda_type_names()(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = optimizer.clip_grad_by_total_norm_fp32 = clip


def _use_fused_adam() -> None:
    import megatron.core.optimizer as package
    from megatron.core.optimizer import distrib_optimizer

    if package.USING_PYTORCH_OPTIMIZER:
        package.USING_PYTORCH_OPTIMIZER = False
        package.Adam = distrib_optimizer.Adam = FusedAdam
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def _load_optimizer_without_grad() -> None:
    from megatron.core.optimizer import distrib_optimizer

    load = distrib_optimizer.DistributedOptimizer.load_state_dict
    distrib_optimizer.DistributedOptimizer.load_state_dict = torch.no_grad()(load)


def _accept_fp8_false() -> None:
    from megatron.core.tensor_parallel import random

    original = random.CheckpointWithoutOutput.__init__

    def init(self: Any, fp8: bool = False) -> None:
        original(self, fp8)
        self.fp8 = bool(fp8)

    random.CheckpointWithoutOutput.__init__ = init


def _use_replicated_latents() -> None:
    from megatron_dppo_megatron_cpu.latent import replicate_latents

    replicate_latents()


def _accept_missing_te_version() -> None:
    """Make version checks of an absent Transformer Engine return False."""
    from megatron.core import utils
    from megatron.core.optimizer import optimizer_config

    if utils.get_te_version() is None:
        optimizer_config.is_te_min_version = lambda *version: False


_ALL = "0.16.1 to 0.19.2"
_DEVICE_AGNOSTIC = "Megatron Core takes the device from its process group instead of torch.cuda"

SHIMS = (
    Shim(_ignore_tensor_cuda, "tensors are moved by .cuda() in embedding and router code", _ALL, _DEVICE_AGNOSTIC),
    Shim(_use_cpu_rng_tracker, "the tracker of random states reads the CUDA generator", _ALL, _DEVICE_AGNOSTIC),
    Shim(
        _define_te_general_gemm,
        "NameError in the router without Transformer Engine: ``te_general_gemm`` is never bound",
        "0.16.1",
        "0.16.1 is no longer supported",
        on_cuda=True,
    ),
    Shim(
        _convert_splits_on_cpu, "all-to-all split sizes become lists only when they are on CUDA", _ALL, _DEVICE_AGNOSTIC
    ),
    Shim(
        support_uneven_splits,
        "gloo has no all-gather and reduce-scatter with uneven splits",
        _ALL,
        "gloo supports uneven splits",
    ),
    Shim(
        skip_single_rank_collectives,
        "gloo copies a whole buffer in a group of one rank, which takes three times as long as Adam",
        _ALL,
        "the distributed optimizer skips such collectives",
    ),
    Shim(
        _use_cuda_type_names_in_optimizer,
        "optimizers compare ``Tensor.type()`` with 'torch.cuda.FloatTensor'",
        _ALL,
        _DEVICE_AGNOSTIC,
    ),
    Shim(
        _use_fused_adam,
        "torch.optim.AdamW cannot step after Megatron's init_state_fn, nor be checkpointed (see fused_adam.py)",
        _ALL,
        "Megatron's checkpoint of a torch AdamW loads and continues bit for bit",
        on_cuda=True,
    ),
    Shim(
        _load_optimizer_without_grad,
        "the distributed optimizer copies a checkpoint into fp32 parameters that require gradients",
        _ALL,
        "Megatron loads it without recording gradients",
        on_cuda=True,
        with_te=True,
    ),
    Shim(
        _accept_missing_te_version,
        "TypeError in the settings of a precision-aware optimizer without Transformer Engine: its version is None",
        "0.16.1",
        "0.16.1 is no longer supported",
        on_cuda=True,
    ),
    Shim(copy_without_cuda, "offloading checks ``is_cuda`` of each tensor, and pins its copy", _ALL, _DEVICE_AGNOSTIC),
    Shim(
        copy_shards_only,
        "offloading copies all weights of a rank to the host before the distributed optimizer builds it on the shards",
        _ALL,
        "the distributed optimizer builds the only HybridDeviceOptimizer",
        on_cuda=True,
        with_te=True,
    ),
    Shim(
        accept_fp32_weights,
        "offloading refuses weights in fp32 of a model of another dtype, or does not update them",
        _ALL,
        "HybridDeviceOptimizer trains weights in fp32",
        on_cuda=True,
        with_te=True,
    ),
    Shim(
        _accept_fp8_false,
        "selective recomputation treats ``fp8 = False`` as fp8 (``is not None``), which needs Transformer Engine",
        _ALL,
        "CheckpointWithoutOutput(fp8=False) means without fp8",
        on_cuda=True,
    ),
    Shim(
        _use_replicated_latents,
        "MLA supports replicated latents only with Transformer Engine's layer; with Megatron's split layers a rank's "
        "part of the gradient of the rotated keys is lost under tensor parallelism",
        _ALL,
        "MLA accepts any layer, and MLASelfAttention sums that gradient",
        on_cuda=True,
    ),
    Shim(
        release_routes,
        "dispatchers keep the routes of a layer, and with full recomputation its input and that input's gradient, "
        "until the layer's next forward pass",
        _ALL,
        "token dispatchers hold no tensor with a gradient after the layer's forward pass",
        on_cuda=True,
        with_te=True,
    ),
)
