"""Compile every variant of the Triton kernels without a GPU, and say what they use: the row kernels for sm_90, and the
hash of weights for sm_80, sm_90 and sm_100.

``python -m tests.unit.compile_row_kernels`` prints one line of JSON a variant; test_row_kernels_triton.py holds the
bounds. Triton compiles a kernel apart for arguments that are divisible by 16: "even" has all of them so, "uneven end"
all but the number of entries, as the last shard of an uneven vocabulary has it, and "uneven rows" none.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_dppo.head.row_kernels_triton import NUM_WARPS, constants, id_slots
from megatron_dppo.head.triton_kernels import gradient_kernel, statistics_kernel
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest import batched_words, words_kernel
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest.word_hash import CONSTANTS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAIRS = (("fp32", "bf16"), ("fp32", "fp32"), ("bf16", "bf16"))
"""logits and out"""
COUNTS = (0, 20, 64, 128)
UNEVEN = {"even": (), "uneven end": ("shard_size",), "uneven rows": ("shard_size", "width", "row_stride", "out_stride")}
"""the sizes that are not divisible by 16"""
TARGETS = (80, 90, 100)
"""Sizes of the hash of weights."""
ROW_ARGUMENTS = ("maximum", "total", "grad_logprobs", "grad_entropy", "entropy")


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """Name, kernel, the types of its arguments, and its constants."""
    pointers = {"labels": "*i64", "ids": "*i64", **dict.fromkeys(ROW_ARGUMENTS, "*fp32")}
    scalars = {"log2_scale": "fp32", "temperature": "fp32"}
    sizes = dict.fromkeys(("row_stride", "out_stride", "shard_size", "width", "num_ids"), "i32")
    for dtype in DTYPES:
        for count in COUNTS:
            types = {**pointers, **scalars, **sizes, "logits": f"*{dtype}", "out": "*fp32"}
            fixed: dict[str, Any] = {"IDS": id_slots(count), **constants(DTYPES[dtype])}
            fixed |= {} if count else {"ids": None}
            for squares in (False, True) if count == 64 else (False,):
                name = f"statistics {dtype} K={count}{' with squares' if squares else ''}"
                yield name, statistics_kernel, types, fixed | {"SQUARES": squares}
    for dtype, out in PAIRS:
        for with_entropy in (False, True):
            types = {**pointers, **scalars, **sizes, "logits": f"*{dtype}", "out": f"*{out}"}
            fixed = constants(DTYPES[dtype])
            without = {} if with_entropy else {"grad_entropy": None, "entropy": None}
            name = f"gradient {dtype} to {out}{' with entropy' if with_entropy else ''}"
            yield name, gradient_kernel, types, fixed | without


def build(
    kernel: Any, types: dict[str, str], fixed: dict[str, Any], uneven: tuple[str, ...], target: int = 90
) -> dict[str, Any]:
    """Compile as Triton's launcher would, and read the resources from the machine code."""
    signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name not in ("num_ids", *uneven))
    }
    source = ASTSource(kernel, signature, fixed, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": NUM_WARPS})
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {name.lower(): int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        **counts,
        "shared": compiled.metadata.shared,
        "atomics": len(re.findall(r"^\s*(?:@\S+ )?(?:atom|red)\.", ptx, re.MULTILINE)),
        "wide_loads": len(re.findall(r"ld\.global\.\S*v4\.b32", ptx)),
        "order": memory_order(ptx),
        "conversions": sorted(set(re.findall(r"cvt\.[a-z.]*bf16x2\.f32", ptx))),
    }


def memory_order(ptx: str) -> str:
    """Loads (l), barriers (b) and stores (s) of global memory in the order of the code, repeats left out."""
    kinds = re.findall(r"(ld\.global|bar(?:rier)?\.sync|st\.global)", ptx)
    return re.sub(r"(.)\1+", r"\1", "".join(kind[0] for kind in kinds))


def main() -> None:
    """All variants of the even sizes, those with most registers of the others."""
    for sizes, uneven in UNEVEN.items():
        for name, kernel, types, fixed in variants():
            if not uneven or "K=64" in name or "with entropy" in name:
                result = build(kernel, types, fixed, uneven)
                print(json.dumps({"name": name, "sizes": sizes, **result}), flush=True)
    types = {"table": "*i64", "sums": "*i32", "num_rows": "i32"}
    fixed = {"FIELDS": batched_words.NUM_FIELDS, "BLOCK": words_kernel.BLOCK, **CONSTANTS}
    for target in TARGETS:
        result = build(words_kernel.hash_parts_kernel, types, fixed, ("num_rows",), target)
        print(json.dumps({"name": f"words sm_{target}", "sizes": "", **result}), flush=True)


if __name__ == "__main__":
    main()
