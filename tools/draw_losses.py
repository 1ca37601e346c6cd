"""Draw what each loss does with a token, over the probabilities that it had (mu) and has (pi): docs/losses/*.png.

python tools/draw_losses.py docs/losses

The factor of ``A grad log pi`` is taken from the gradient of ``losses.policy_loss`` itself, for A = 1 and A = -1.
``grids.json`` has the numbers of a coarser grid; a test computes them anew and compares.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.losses import policy_loss
from megatron_dppo.types import LossInputs

GALLERY = Path(__file__).parents[1] / "docs/losses"
CELLS = 161
STRIDE = 20
"""Step between the written grid points, in cells."""
LARGEST_SQUARE = 0.25
"""Largest (log r)^2 that M2PO keeps in its picture. In a run the batch decides."""
RECOMPUTED = 0.8
"""Ratio pi' / mu in the pictures, where pi' is the probability recomputed by the trainer with the rollout weights."""
HEAD_MU, HEAD_PI = (0.7, 0.2), (0.4, 0.5)
"""Shares of ``1 - p(sampled token)`` of the two other Top-K ids under mu and pi. A tenth is outside the Top-K.

The order of the two ids is swapped, so the Top-K divergence exceeds that of the sampled token alone.
"""


def entries() -> list[dict[str, Any]]:
    """Return the entries of ``gallery.toml``, in order."""
    return tomllib.loads((GALLERY / "gallery.toml").read_text(encoding="utf-8"))["entry"]


def axis() -> Tensor:
    """Return probabilities from .001 to .999, evenly spaced in log-odds. Shape ``[CELLS]``."""
    return torch.linspace(-6.9, 6.9, CELLS, dtype=torch.float64).sigmoid()


def factors(config: LossConfig, advantage: float) -> Tensor:
    """Return the factor w M of ``A grad log pi``, 0 where masked. Shape ``[CELLS, CELLS]``: pi down, mu across."""
    mu, pi = (x.flatten() for x in torch.meshgrid(axis(), axis(), indexing="xy"))
    logprobs = pi.log().requires_grad_()
    ones = torch.ones_like(mu)
    head: dict[str, Any] = {}
    if config.is_topk:
        mu_pair, pi_pair = ((1 - p)[:, None] * torch.tensor(part) for p, part in ((mu, HEAD_MU), (pi, HEAD_PI)))
        head = {
            "topk_logprobs": torch.cat([pi_pair, pi[:, None]], 1).log().requires_grad_(),
            "rollout_topk_logprobs": torch.cat([mu_pair, mu[:, None]], 1).log(),
            "topk_valid": torch.ones(len(mu), 3, dtype=torch.bool),
            "topk_other_logprob": ((1 - pi) * 0.1).log(),
            "topk_other_square": ((1 - pi) * 0.1).square(),  # as if the rest were one token
        }
    inputs = LossInputs(
        logprobs=logprobs,
        rollout_logprobs=mu.log(),
        advantages=advantage * ones,
        loss_mask=ones.bool(),
        recomputed_logprobs=(RECOMPUTED * mu).log() if config.uses_recomputed_logprobs else None,
        sequence_ids=torch.arange(len(mu)) if "sequence_ids" in config.required_inputs else None,
        token_weights=ones if "token_weights" in config.required_inputs else None,
        statistics={"largest_square": LARGEST_SQUARE},
        **head,
    )
    policy_loss(inputs, config).loss_sum.backward()
    assert logprobs.grad is not None
    return (-logprobs.grad / advantage).view(CELLS, CELLS)


def numbers(config: LossConfig) -> dict[str, Any]:
    """Return the entry of a loss in ``grids.json``: masked shares, and the factors at every ``STRIDE``-th cell."""
    grids: dict[str, Any] = {}
    for name, advantage in (("up", 1.0), ("down", -1.0)):
        grid = factors(config, advantage)
        grids[f"masked_{name}"] = round(float((grid == 0).double().mean()), 3)
        grids[f"factor_{name}"] = [[float(f"{x:.3g}") + 0.0 for x in row] for row in grid[::STRIDE, ::STRIDE].tolist()]
    return grids


def draw(entry: dict[str, Any], picture: Path) -> None:
    """Draw one picture of two panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    config = LossConfig(**entry["config"])
    probabilities = axis()
    with plt.rc_context({"font.size": 7}):
        figure, panels = plt.subplots(1, 2, figsize=(5.2, 2.5), layout="constrained", sharey=True)
        for panel, advantage, sign in zip(panels, (1.0, -1.0), (">", "<"), strict=True):
            grid = factors(config, advantage)
            power = torch.where(grid > 0, grid, torch.nan).log2().clamp(-4, 4)
            image = panel.pcolormesh(
                probabilities, probabilities, power, cmap="RdBu_r", norm=TwoSlopeNorm(0, -4, 4), rasterized=True
            )
            for where, color in ((grid == 0, "#3a3a3a"), (grid < 0, "#8e44ad")):
                marked = torch.where(where, 1.0, torch.nan)
                panel.pcolormesh(probabilities, probabilities, marked, cmap=matplotlib.colors.ListedColormap([color]))
            panel.plot(probabilities, probabilities, color="black", linewidth=0.5, linestyle=":")
            panel.set(xscale="logit", yscale="logit", xlabel="μ", title=f"A {sign} 0")
            panel.set_xticks([0.01, 0.1, 0.5, 0.9, 0.99], ["1%", "10%", "50%", "90%", "99%"])
            panel.set_yticks([0.01, 0.1, 0.5, 0.9, 0.99], ["1%", "10%", "50%", "90%", "99%"])
            panel.minorticks_off()
        panels[0].set_ylabel("π")
        bar = figure.colorbar(image, ax=panels, ticks=[-4, -2, 0, 2, 4])
        bar.ax.set_yticklabels(["1/16", "1/4", "1", "4", "16"])
        bar.set_label("factor of A ∇ log π")
        figure.suptitle(f"{entry['title']} (dark: masked; purple: turned around)", fontsize=8)
        figure.savefig(picture, dpi=90, metadata={"Software": None}, pil_kwargs={"optimize": True})
        plt.close(figure)


def main() -> None:
    """Draw all losses and write ``grids.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    grids = {}
    for entry in entries():
        grids[entry["id"]] = numbers(LossConfig(**entry["config"]))
        draw(entry, folder / f"{entry['id']}.png")
    lines = [f"  {json.dumps(name)}: {json.dumps(grid)}" for name, grid in grids.items()]
    (folder / "grids.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
