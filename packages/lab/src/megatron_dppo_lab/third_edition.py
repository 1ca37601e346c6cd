"""The wind tunnel's third edition: questions of DPPO's users, in the order of their columns."""

from itertools import pairwise

from megatron_dppo_lab.experiment import Block, Claim, Experiment
from megatron_dppo_lab.third_losses import DELTAS, DRPO_DELTAS

_BINARY = "dppo_binary_tv tuned"
_CENTERED = "dppo_binary_tv centered tuned"
_QUESTIONS = (_BINARY, "dppo_topk_tv tuned", _CENTERED, "drpo/12.5")
"""Binary or Top-K, centering, and the setting of DRPO's authors."""
_DELTAS = tuple(f"dppo_binary_tv {delta}" for delta in DELTAS)
_CORE = (*_QUESTIONS, "drpo tuned", "grpo tuned", "pg_is")
_AGAINST_BINARY = (
    *("dppo_binary_kl tuned", "dppo_binary_tv age tuned", "dppo_binary_tv knee tuned", "skyrl/default"),
    *(f"drpo/{delta:g}" for delta in DRPO_DELTAS[1:]),
    *("spo tuned", "ipo tuned", "cispo tuned", "score_centering tuned", "sapo tuned", "gspo tuned"),
    *("gmpo tuned", "cppo tuned", "trm tuned", "vespo tuned"),
)
_STALE = ("staleness 8",)
_PERTURBED = (
    *("weights fp8", "weights int8", "weights int4", "router_noise 1.0", "router_noise 1.0, replay"),
    *("hidden_temperature 0.8", "staleness 16", "top_p 0.9", "updates 64", "none"),
)
_CLAIMS = (
    Claim("Top-K TV is better than Binary TV", "dppo_topk_tv tuned", _BINARY),
    Claim("Top-K KL is better than Binary KL", "dppo_topk_kl tuned", "dppo_binary_kl tuned"),
    Claim("centering helps DPPO", _CENTERED, _BINARY),
    Claim("DRPO with its authors' delta is better than a hard mask", "drpo/12.5", _BINARY),
    Claim("DRPO with a searched delta is better than a hard mask", "drpo tuned", _BINARY),
    Claim("DRPO's full settings are better than a hard mask", "drpo/paper", _BINARY),
    Claim("DPPO is better than ratio clipping", _BINARY, "grpo tuned"),
    Claim("DPPO is better than recomputed ratio clipping", _BINARY, "minirl"),
    Claim("DPPO is better than no trust region", _BINARY, "pg_is"),
    *(Claim("a larger delta is better", high, low) for low, high in pairwise(_DELTAS)),
    *(Claim(f"{name} is better than DPPO", name, _BINARY) for name in _AGAINST_BINARY),
)
THIRD_EDITION = Experiment(
    "windtunnel3",
    "Wind tunnel, third edition: losses with searched settings, exact tests over paired seeds",
    blocks=(
        Block("rare_words", _QUESTIONS, _STALE, {}),
        Block("rare_words", (*_DELTAS, *_CORE[4:]), _STALE, {}),
        Block("chain_sum", (*_CORE, *_DELTAS), _STALE, {}, searched_on="rare_words"),
        Block("rare_words_32k", (*_CORE, *_DELTAS), _STALE, {}, searched_on="rare_words"),
        Block("rare_words", _QUESTIONS, _PERTURBED, {}),
        Block("rare_words", ("minirl",), ("updates 64", "none"), {}),
        Block("rare_words", (*_QUESTIONS, "drpo/paper"), ("updates 1, lr 3e-3",), {}),
        Block("rare_words", (*_AGAINST_BINARY, "dppo_topk_kl tuned"), _STALE, {}),
        Block(
            "chain_sum", _QUESTIONS, ("weights int4", "router_noise 1.0", "router_noise 1.0, replay"), {}, "rare_words"
        ),
        Block("rare_words_32k", _QUESTIONS, ("weights fp8", "weights int4"), {}, searched_on="rare_words"),
    ),
    quick=(Block("rare_words", _QUESTIONS, _STALE, {}),),
    claims=_CLAIMS,
    seeds=tuple(range(12)),
    search_under="staleness 8",
    has_paired_tests=True,
)
