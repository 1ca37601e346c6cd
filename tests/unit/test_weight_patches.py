"""What changed of a tensor travels and arrives byte by byte, also where a server keeps fusions and shards."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from megatron_dppo.serving.sglang_extension.megatron_dppo_delta import Patch, load, packed, patch_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def changed(old: Tensor, share: float, seed: int = 0) -> Tensor:
    """Other values in a share of the elements."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(old.shape, generator=generator) < share
    return torch.where(chosen, torch.randn(old.shape, generator=generator).to(old), old)


class Plain(nn.Module):
    """A model that keeps our tensors as they are."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: w.clone() for name, w in weights.items()})
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.weights[name].data.copy_(tensor)


def sent(old: Tensor, new: Tensor) -> Tensor:
    """What a server has that had ``old`` and got a patch, twice: it is taken as often as it comes."""
    patch = patch_of("w", old, new)
    assert patch is not None
    model = Plain({"w": old})
    for _ in range(2):
        load(model, packed([patch]))
    return model.weights["w"].data


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_patch_makes_the_new_bytes_of_the_old_ones(dtype: torch.dtype) -> None:
    old = torch.randn(300, 700, generator=torch.Generator().manual_seed(1)).to(dtype)  # three farthest gaps
    for share in (1e-5, 0.01, 0.3 if dtype == torch.float32 else 0.2):
        new = changed(old, share)
        assert as_bytes(new) != as_bytes(old) and as_bytes(sent(old, new)) == as_bytes(new)
    alone = old.clone()
    alone[299, 699] = 3.0
    patch = patch_of("w", old, alone)
    assert patch is not None and len(patch.gaps) == 5 and as_bytes(sent(old, alone)) == as_bytes(alone)
    none = patch_of("w", old, old.clone())
    assert none is not None and not len(none.gaps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_of_zero_infinities_and_what_was_no_number_before_count_as_bytes(dtype: torch.dtype) -> None:
    old = torch.randn(64, 8).to(dtype)
    old[1, :4], old[2, 2] = 0.0, torch.nan
    new = old.clone()
    new[1, 1], new[3, 3], new[4, 4] = -0.0, torch.inf, -torch.inf
    patch = patch_of("w", old, new)
    assert patch is not None and len(patch.gaps) == 4
    assert as_bytes(sent(old, new)) == as_bytes(new)
    new[2, 2] = 1.0
    assert as_bytes(sent(old, new)) == as_bytes(new)
    new[5, 5] = torch.nan
    assert patch_of("w", old, new) is None


def test_what_a_patch_would_not_make_smaller_goes_whole() -> None:
    old = torch.randn(64, 64).bfloat16()
    assert patch_of("w", old, old + 1) is None
    assert patch_of("w", old, changed(old, 0.45)) is not None and patch_of("w", old, changed(old, 0.55)) is None
    assert patch_of("w", torch.zeros(1), torch.ones(1)) is None
    assert patch_of("w", old, old.float()) is None and patch_of("w", old, old.view(32, 128)) is None
    assert patch_of("w", torch.arange(9), torch.arange(9)) is None


def test_tensors_of_several_types_travel_together() -> None:
    old = {str(dtype): torch.zeros(20, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)}
    new = {name: w.index_fill(0, torch.tensor([1]), 2.0) for name, w in old.items()}
    patches = [patch for name in old if (patch := patch_of(name, old[name], new[name]))]
    assert len(patches) == 3 and patches[0].values.nbytes % 4 == 0
    patches[0] = patches[0]._replace(gaps=patches[0].gaps[:3], values=patches[0].values[:3])  # six bytes
    new["torch.bfloat16"][1, 2] = 0.0
    model = Plain({name.replace(".", "_"): w for name, w in old.items()})
    load(model, packed([patch._replace(name=patch.name.replace(".", "_")) for patch in patches]))
    assert all(as_bytes(model.weights[name.replace(".", "_")]) == as_bytes(new[name]) for name in new)


class Engine(nn.Module):
    """One of two ranks that loads as SGLang's loaders do: fused q, k, v and gate, up; its half of rows or columns;
    experts in one tensor by assignment; padded rows through a buffer; a router in float32."""

    def __init__(self) -> None:
        super().__init__()

        def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.qkv, self.o, self.router = weight(8 + 4 + 4, 16), weight(16, 8), weight(4, 16, dtype=torch.float32)
        self.w13, self.w2, self.embedding = weight(4, 2 * 6, 16), weight(4, 16, 6), weight(64, 16)
        self.register_buffer("bias", torch.zeros(4))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            kind, _, index = name.partition(".")
            if kind in ("q", "k", "v"):
                start, rows = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}[kind]
                self.qkv.data.narrow(0, start, rows).copy_(tensor.narrow(0, rows, rows))
            elif kind == "o":
                self.o.data.t().copy_(tensor.t()[8:])
            elif kind == "down":
                self.w2.data[int(index)] = tensor[:, 6:]
            elif kind in ("gate", "up"):
                self.w13.data[int(index)].narrow(0, 6 * (kind == "up"), 6).copy_(tensor[6:].contiguous())
            elif kind == "embedding":
                rows = torch.zeros(64, 16, dtype=tensor.dtype)
                rows[: len(tensor)] = tensor
                self.embedding.data.copy_(rows)
            else:
                getattr(self, kind).copy_(tensor)


def model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (16, 16), "k": (8, 16), "v": (8, 16), "o": (16, 16), "router": (4, 16), "bias": (4,)}
    shapes |= {f"{kind}.{e}": (12, 16) for e in range(4) for kind in ("gate", "up")}
    shapes |= {f"down.{e}": (16, 12) for e in range(4)} | {"embedding": (50, 16)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def test_loaders_of_fusions_shards_and_casts_keep_what_did_not_change() -> None:
    old = model(0)
    new = {name: changed(w, 0.1, i) for i, (name, w) in enumerate(old.items())}
    new["bias"] = torch.tensor([1.0, torch.nan, 2.0, torch.inf]).bfloat16()  # whole, in the same call
    right, found = Engine(), Engine()
    right.load_weights(new.items())
    found.load_weights(old.items())
    patches = [patch_of(name, old[name], new[name]) for name in new]
    changes = [(name, new[name]) for name, patch in zip(new, patches, strict=True) if patch is None]
    kept: list[Patch] = [patch for patch in patches if patch is not None and len(patch.gaps)]
    assert len(changes) == 1 and len(kept) > 12
    load(found, [*changes, *packed(kept)])
    for (name, weight), other in zip(right.state_dict().items(), found.state_dict().values(), strict=True):
        assert as_bytes(weight) == as_bytes(other), name
    # Nothing of it stays: what is loaded whole later may be no number.
    found.load_weights([("router", torch.full((4, 16), torch.nan))])
    assert found.router.isnan().all()
