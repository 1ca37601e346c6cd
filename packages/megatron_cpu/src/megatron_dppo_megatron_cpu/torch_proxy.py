"""Proxy of ``torch`` for Megatron's modules on a machine without CUDA.

Reason: Megatron calls ``torch.cuda.*`` and creates tensors with ``device="cuda"`` unconditionally. On CPU the global
    name ``torch`` of each ``megatron.core`` module is bound to a proxy that gives ``torch.cuda.*`` a meaning on CPU and
    creates such tensors on CPU. Everything else passes through; torch itself does not change.
Affected: Megatron Core 0.16.1 to 0.19.2.
Delete when: Megatron takes the device from its process groups instead of torch.cuda.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_CPU = torch.device("cpu")


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: CPU work is ordered, and finished already."""


class NullEvent:
    """CUDA event that is always complete."""

    __init__ = record = wait = synchronize = _do_nothing

    def query(self) -> bool:
        """Return True: the work is finished."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Return 0: the milliseconds between two events are not measured."""
        return 0.0


class NullStream:
    """CUDA stream for synchronous execution: all work is finished already."""

    __init__ = wait_stream = wait_event = synchronize = _do_nothing
    query = NullEvent.query

    def record_event(self, event: Any = None) -> Any:
        """Return the event, which is complete."""
        return event or NullEvent()


class _CudaProxy(types.ModuleType):
    """``torch.cuda`` with CPU implementations of the functions that Megatron calls in training."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        stream = NullStream()
        self.__dict__.update(
            Stream=NullStream,
            Event=NullEvent,
            # Megatron passes the result on as ``device=``.
            current_device=lambda: _CPU,
            device_count=lambda: 1,
            current_stream=lambda *a: stream,
            default_stream=lambda *a: stream,
            stream=lambda s: contextlib.nullcontext(),
            synchronize=_do_nothing,
            empty_cache=_do_nothing,
            set_device=_do_nothing,
            get_rng_state=lambda *a, **k: torch.get_rng_state(),
            set_rng_state=lambda state, *a, **k: torch.set_rng_state(state),
            manual_seed=torch.manual_seed,
            manual_seed_all=torch.manual_seed,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "linspace", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        # Pinning needs CUDA.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


class TorchProxy(types.ModuleType):
    """Replacement of ``torch`` in Megatron's modules on CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__["cuda"] = _CudaProxy()
        self.__dict__.update({name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Import hook that patches each module of the named packages right after its execution."""

    def __init__(self, packages: Sequence[str], patch: Callable[[types.ModuleType], None]) -> None:
        self._packages = tuple(packages)
        self._patch = patch

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the ordinary spec, with a loader that patches after execution."""
        if not name.startswith(self._packages):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self._patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def bind_proxy(packages: Sequence[str]) -> None:
    """Bind the proxy in every module of ``packages`` (dotted prefixes) that is imported from now on."""
    proxy = TorchProxy()

    def patch(module: types.ModuleType) -> None:
        if getattr(module, "torch", None) is torch:
            module.torch = proxy  # type: ignore[attr-defined]
        if module.__name__ == "megatron.core.jit":
            # Megatron fuses small functions by torch.compile, whose start-up costs minutes on CPU.
            module.disable_jit_fuser()

    sys.meta_path.insert(0, _PatchingFinder(packages, patch))


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """Make ``Tensor.type()`` return CUDA type names inside the block; Megatron's optimizers compare these strings."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def is_on_device(caller: types.FrameType) -> bool:
    """Return the ``Tensor.is_cuda`` for Megatron's offloading: True, except for the host copy that the caller made."""
    # ``cpu_copy`` is a local variable of HybridDeviceOptimizer._get_sub_optimizer_param_groups.
    return not caller.f_locals.get("cpu_copy", False)


@contextlib.contextmanager
def host_copies() -> Iterator[None]:
    """Replace ``Tensor.is_cuda`` by ``is_on_device``, and disable pinning, inside the block."""
    pin_memory = torch.Tensor.pin_memory
    torch.Tensor.is_cuda = property(lambda self: is_on_device(sys._getframe(1)))  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, *a: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.Tensor.is_cuda
        torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
