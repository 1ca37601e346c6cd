"""Lets the unmodified SGLang wheel serve on a machine without GPU. For tests only; never part of the package.

Reason: SGLang's CPU path is pure torch, but its modules import CUDA-only packages (triton, sgl_kernel, flashinfer and
others) at their top, whether or not the path uses them. None of those has a wheel that works without a GPU.
Affected: 0.5.20 and 0.5.23, with `--device cpu` on a CPU without AMX kernels (sgl-kernel-cpu not installed).
Delete when: `python -m sglang.launch_server --device cpu` starts from `pip install sglang` on a machine without GPU, or
a `sgl-kernel` wheel for CPUs is on the package index.

Three things are done, nothing else:

1. Packages of ``STANDINS`` that are not installed become importable. What they hold can be named, decorated with and
   inherited from; launching a kernel raises. ``importlib.util.find_spec`` goes on to answer None for them, so that
   torch and transformers do not believe that they are there.
2. Functions that call CUDA on any device do not, and a paused scheduler leaves its core to the trainer (``_FIXES``).
3. SGLang forks its processes where it would spawn them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import multiprocessing.context
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

STANDINS = frozenset(
    [
        "triton",
        "torchvision",
        "torchaudio",
        "sgl_kernel",
        "flashinfer",
        "deep_gemm",
        "cuda",
        "cutlass",
        "soundfile",
        "av",
        "decord",
        "blobfile",
        "anthropic",
        "IPython",
        "scipy",
        "pynvml",
        "interegular",
        "watchfiles",
        "tiktoken",
        "zstandard",
        "modelscope",
    ]
)


class _Meta(type):
    """Attributes of a stand-in class are stand-ins."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Module(f"{cls.__module__}.{cls.__name__}.{name}")


class _Anything(metaclass=_Meta):
    """A class that can be inherited from and made with any arguments."""

    def __init_subclass__(cls, **_: Any) -> None: ...

    def __init__(self, *_: Any, **__: Any) -> None: ...


class _Kernel:
    """Result of ``@triton.jit``: it has a name, but cannot be launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.arg_names: list[str] = []

    def __call__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"the GPU kernel {self.__name__} was launched on a machine without GPU")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.__call__


class _Module(types.ModuleType):
    """A package, or any object in it, that is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__package__ = name
        self.__file__ = __file__
        self.__version__ = "3.6.0"
        self.__spec__ = importlib.machinery.ModuleSpec(name, _Finder, is_package=True)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value: Any = sys.modules.get(full)
        if value is None:
            value = _standin_class(self.__name__, name) if name[:1].isupper() else _Module(full)
            if isinstance(value, _Module):
                sys.modules[full] = value
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Act as a decorator, with or without arguments."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return _Kernel(args[0])
        return lambda function: _Kernel(function) if callable(function) else function

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __or__(self, other: Any) -> _Module:
        return self

    __ror__ = __mul__ = __or__


def _standin_class(module: str, name: str) -> type:
    if name.endswith("Error") or name.startswith("OutOf"):
        return type(name, (Exception,), {"__module__": module})
    return _Meta(name, (_Anything,), {"__module__": module})


class _Config:
    """``triton.Config`` keeps its arguments: kernels list them at import."""

    def __init__(self, kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        self.__dict__.update(kwargs=kwargs or {}, **more)


class _Constexpr:
    """``triton.language.constexpr`` keeps its value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def _make(name: str) -> _Module:
    """Return the stand-in of a module, with the few plain functions that are called at import."""
    module = _Module(name)
    if name == "triton":
        module.cdiv = lambda a, b: -(a // -b)
        module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
        module.Config = _Config
    if name == "triton.language":
        module.constexpr = _Constexpr
    return module


class _Finder:
    """Stands last in ``sys.meta_path``: an installed package wins."""

    standins: Collection[str] = ()

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in cls.standins:
            return None
        return importlib.machinery.ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> _Module:
        known = sys.modules.get(spec.name)
        return known if isinstance(known, _Module) else _make(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None: ...


def _plain_host_buffer(module: Any) -> None:
    """Reason: the host buffer of the routed experts is registered with CUDA even when the device is the CPU, and fails.

    Affected: 0.5.20 and 0.5.23. Delete when: ``--enable-return-routed-experts`` starts with ``--device cpu``.
    """
    import torch

    def allocate(dims: Any, dtype: Any, device: Any, pin_memory: bool = False, allocator: Any = None, **_: Any) -> Any:
        return torch.empty(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _no_synchronize(module: Any) -> None:
    """Reason: the checksums of the weights wait for CUDA whatever the device is, and fail.

    Affected: 0.5.20. Delete when: 0.5.20 is no longer tested.
    """
    module.torch.cuda.synchronize = lambda *_: None


def _not_pinned(module: Any) -> None:
    """Reason: LoRA puts small tables of the host into pinned memory whatever the device is, and fails.

    Affected: 0.5.20 and 0.5.23. Delete when: ``--enable-lora`` starts with ``--device cpu``.
    """
    torch = module.torch

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _gate_in_torch(module: Any) -> None:
    """Reason: the gate of Qwen2-MoE's shared expert is a Triton kernel whatever the device is.

    Affected: 0.5.23. Delete when: Qwen2-MoE answers with ``--device cpu``.
    """

    def launch(hidden: Any, weight: Any, shared: Any, output: Any, *, do_add: bool) -> None:
        gate = (hidden.float() @ weight.float()).sigmoid()[:, None]
        gated = gate * shared.float()
        output.copy_(gated + output.float() if do_add else gated)

    module._launch_fused_gate_sigmoid_mul = launch


def _rest_while_paused(module: Any) -> None:
    """Reason: a paused scheduler polls for requests without a rest, also with ``--sleep-on-idle``, and takes a core.

    Affected: 0.5.20 and 0.5.23. Delete when: a paused server with ``--sleep-on-idle`` uses no CPU time.
    """
    process = module.Scheduler.process_input_requests

    def process_and_rest(self: Any, requests: Any) -> None:
        process(self, requests)
        if self._engine_paused and self.idle_sleeper is not None:
            # Ends with the next request. Not a second as when it is idle: a flush that waits is checked in this loop.
            self.idle_sleeper.poller.poll(20)

    module.Scheduler.process_input_requests = process_and_rest


_FIXES: dict[str, Callable[[Any], None]] = {
    "sglang.kernels.ops.elementwise.elementwise": _gate_in_torch,
    "sglang.srt.lora.layers": _not_pinned,
    "sglang.srt.managers.scheduler": _rest_while_paused,
    "sglang.srt.mem_cache.pool_host.common": _plain_host_buffer,
    "sglang.srt.utils.weight_checker": _no_synchronize,
}


class _Fixer:
    """Runs the fix of a module right after its import."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _FIXES:
            return None
        fix = _FIXES.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            fix(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _enable_fixes() -> None:
    if _Fixer not in sys.meta_path:
        sys.meta_path.insert(0, _Fixer)  # type: ignore[arg-type]


def fix_after_import(name: str, fix: Callable[[Any], None]) -> None:
    """Call ``fix`` with a module of this name right after its import."""
    _FIXES[name] = fix
    _enable_fixes()


def install(standins: Collection[str] = STANDINS, *, has_fixes: bool = True) -> None:
    """Put the stand-ins and the fixes in place, once in a process."""
    if any(finder is _Finder for finder in sys.meta_path):
        return
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        spec = real(name, package)
        return None if spec is not None and spec.loader is _Finder else spec  # type: ignore[comparison-overlap]

    importlib.util.find_spec = find_spec
    if has_fixes:
        _enable_fixes()
        # SGLang spawns its processes because of CUDA, and each imports everything anew: half of the time of a start.
        contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        contexts["spawn"] = contexts["fork"]
    _Finder.standins = standins
    sys.meta_path.append(_Finder)  # type: ignore[arg-type]
