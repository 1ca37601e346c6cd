"""Declared experiments."""

from collections.abc import Mapping

from megatron_dppo_lab.catalogue import REAL_MIXTURE, REAL_MODEL, SECOND_LOSSES
from megatron_dppo_lab.experiment import Block, Claim, Experiment
from megatron_dppo_lab.grid import Settings
from megatron_dppo_lab.third_edition import THIRD_EDITION

_MASKS = ("dppo_binary_tv", "dppo_binary_kl", "dppo_topk_tv", "dppo_topk_kl")
_CAPPED = tuple(f"{name} cap 5" for name in _MASKS)
_RELAXED_GRPO = ("grpo relaxed up", "grpo relaxed down", "grpo relaxed both")
FIGURE_LOSSES = (*_RELAXED_GRPO, "dppo_binary_tv far", *_CAPPED[1:])
"""Losses of single experiments, not of the wind tunnel."""
_EVERY = tuple(name for name in SECOND_LOSSES if name not in FIGURE_LOSSES)
_MAIN = ("dppo_binary_tv", "dppo_binary_tv cap 2", "dppo_binary_kl", "grpo", "pg_is")
_CLAIMS = (
    Claim("DPPO (Binary-TV) learns faster than ratio clipping", "dppo_binary_tv", "grpo"),
    Claim("DPPO (Binary-KL) learns faster than ratio clipping", "dppo_binary_kl", "grpo"),
    Claim("a trust region holds what no trust region loses", "dppo_binary_tv", "pg_is", "final"),
    Claim("a capped weight is not enough without a mask", "dppo_binary_tv", "cispo", "final"),
    Claim("Top-K TV is better than Binary TV", "dppo_topk_tv", "dppo_binary_tv"),
    Claim("Top-K KL is better than Binary KL", "dppo_topk_kl", "dppo_binary_kl"),
    Claim("the predicted direction is better than the sampled one (TV)", "dppo_topk_tv predictive", "dppo_topk_tv"),
    Claim("the predicted direction is better than the sampled one (KL)", "dppo_topk_kl predictive", "dppo_topk_kl"),
    Claim("centering the score is better than truncation alone", "score_centering", "cispo"),
    Claim(
        "a smooth mask (DRPO, best delta of 0.05, 0.15, 0.3; its authors' 12.5 was not run) is better than a hard one",
        "drpo",
        "dppo_binary_tv",
    ),
    Claim("DPPO's asymmetric mask is better than IPO's", "dppo_binary_tv", "ipo"),
    Claim("a cap of 2 is better than no cap", "dppo_binary_tv cap 2", "dppo_binary_tv", "final"),
    Claim("a cap of 5 is better than no cap", "dppo_binary_tv cap 5", "dppo_binary_tv", "final"),
)
_WINDTUNNEL = Experiment(
    "windtunnel",
    "Losses under controlled mismatches of engine and trainer",
    blocks=(
        Block(
            "rare_words",
            _EVERY,
            (
                *("none", "bf16", "weights fp8", "weights int4", "router_noise 1.0"),
                *("staleness 4", "staleness 8", "staleness 4, lr 1e-3", "hidden_top_p 0.9"),
            ),
            {},
        ),
        Block("rare_chain", _EVERY, ("hot",), {}, searched_on="rare_words"),
        Block("chain_sum", _EVERY, ("weights int4", "staleness 8"), {}, searched_on="rare_words"),
    ),
    quick=(
        Block("rare_words", _MAIN, ("none", "weights int4", "router_noise 1.0", "staleness 4", "hidden_top_p 0.9"), {}),
    ),
    claims=_CLAIMS,
    search_under="staleness 4",
)
_SANITY = ("pg_is", "cispo", "grpo", "minirl", "dppo_binary_tv", "dppo_binary_kl", "dppo_topk_tv", "dppo_topk_kl")
_STABILITY = Experiment(
    "stability",
    "Sanity test: many updates a rollout, a coarse engine, a constant learning rate (the paper's figures 3 and 4)",
    blocks=(Block("chain_sum", _SANITY, ("weights fp8",), {"train": {"epochs": 4}, "optimizer": {"lr": 6e-4}}),),
    quick=(
        Block(
            "chain_sum",
            ("pg_is", "grpo", "dppo_binary_tv"),
            ("weights fp8",),
            {"train": {"epochs": 4}, "optimizer": {"lr": 6e-4}, "run": {"num_steps": 20}},
        ),
    ),
    claims=(
        Claim("a trust region holds what no trust region loses", "dppo_binary_tv", "pg_is", "final"),
        Claim("a capped weight is not enough without a mask", "dppo_binary_tv", "cispo", "final"),
        Claim("DPPO holds more than ratio clipping", "dppo_binary_tv", "grpo", "final"),
    ),
)
_RELAXED_LOSSES = ("grpo", *_RELAXED_GRPO, "dppo_binary_tv")
_RELAXED = Experiment(
    "relaxed",
    "Ratio clipping relaxed in one direction or both (after the paper's figure 5)",
    blocks=(Block("rare_words", _RELAXED_LOSSES, ("staleness 4",), {}),),
    quick=(Block("rare_words", _RELAXED_LOSSES, ("staleness 4",), {}),),
    claims=(
        Claim("relaxing the clip of rising tokens helps", "grpo relaxed up", "grpo"),
        Claim("relaxing the clip of falling tokens helps", "grpo relaxed down", "grpo"),
        Claim("relaxing both is better than rising tokens alone", "grpo relaxed both", "grpo relaxed up"),
    ),
)
_BAD_LOSSES = ("pg_is", "dppo_binary_tv far", "dppo_binary_tv")
_BAD = Experiment(
    "bad_updates",
    "Masking only falling tokens that are half a probability away: how few updates do the harm",
    blocks=(Block("chain_sum", _BAD_LOSSES, ("staleness 8",), {}), Block("rare_chain", _BAD_LOSSES, ("hot",), {})),
    quick=(Block("rare_chain", _BAD_LOSSES, ("hot",), {}),),
    claims=(
        Claim("masking a few bad updates is enough to hold", "dppo_binary_tv far", "pg_is", "final"),
        Claim("the usual threshold is better than masking a few", "dppo_binary_tv", "dppo_binary_tv far", "final"),
    ),
)
_RATIO_CAP = Experiment(
    "ratio_cap",
    "Capped weights beside each of DPPO's masks, at the default thresholds",
    blocks=(Block("rare_chain", (*_MASKS, "dppo_binary_tv cap 2", *_CAPPED), ("hot",), {}),),
    quick=(Block("rare_chain", ("dppo_binary_tv", "dppo_binary_tv cap 5"), ("hot",), {}),),
    claims=tuple(
        Claim(f"a cap of {cap} is better than no cap ({name})", f"{name} cap {cap}", name, "final")
        for name, cap in [*((name, 5) for name in _MASKS), ("dppo_binary_tv", 2)]
    ),
)
_LONG_LOSSES = ("dppo_binary_tv", "dppo_binary_kl", "grpo", "pg_is")
_LONG_TAIL = Experiment(
    "long_tail",
    "A long-tailed vocabulary: what ratio clipping masks there, and what that costs",
    blocks=(Block("rare_words", _LONG_LOSSES, ("none", "staleness 4"), {}),),
    quick=(Block("rare_words", _LONG_LOSSES, ("staleness 4",), {}),),
    claims=_CLAIMS[:2],
)
_PRECISION = Experiment(
    "precision",
    "Engine and trainer both in bf16, and both in fp16",
    blocks=(Block("rare_words", ("dppo_binary_tv", "grpo", "pg_is"), ("none", "bf16 both", "fp16 both"), {}),),
    quick=(Block("rare_words", ("dppo_binary_tv",), ("bf16 both", "fp16 both"), {}),),
)
_DEFAULT = "dppo_binary_tv cap 5"
_REAL_LOSSES = (_DEFAULT, "grpo", "pg_is")
_REAL_QUESTIONS = ("dppo_topk_tv cap 5", "dppo_binary_tv centered", "dppo_binary_tv 0.05", "dppo_binary_tv 0.6")
"""Questions of DPPO's users: Top-K or Binary, centering, and which delta."""
_REAL_MODEL = Experiment(
    "real_model",
    "A real language model, SmolLM2-135M-Instruct, on sums: losses side by side",
    blocks=(
        Block(REAL_MODEL, _REAL_LOSSES, ("none", "staleness 4"), {}),
        Block(REAL_MODEL, _REAL_LOSSES[:2], ("weights int8", "weights int4"), {}),
    ),
    quick=(Block(REAL_MODEL, _REAL_LOSSES, ("staleness 4",), {"run": {"num_steps": 5}}),),
    claims=(
        Claim("DPPO learns faster than ratio clipping", _DEFAULT, "grpo"),
        Claim("DPPO ends higher than ratio clipping", _DEFAULT, "grpo", "final"),
        Claim("a trust region holds what no trust region loses", _DEFAULT, "pg_is", "final"),
        Claim("DPPO answers more of the held-out sums than ratio clipping", _DEFAULT, "grpo", "held_out"),
        Claim("DPPO answers more of the held-out sums than no trust region", _DEFAULT, "pg_is", "held_out"),
    ),
)
_LONG_RUN: Settings = {"run": {"num_steps": 30}}
_REAL_MODEL_END = Experiment(
    "real_model_end",
    "What keeps a real language model at its best: learning rate, groups with signal, trust region",
    blocks=(
        Block(
            REAL_MODEL,
            (_DEFAULT,),
            (
                *("none", "constant rate", "constant rate 1e-5"),
                *("constant rate groups with signal", "constant rate entropy bonus"),
            ),
            _LONG_RUN,
        ),
        Block(REAL_MODEL, ("pg_is",), ("constant rate",), _LONG_RUN),
    ),
    quick=(Block(REAL_MODEL, (_DEFAULT,), ("none", "constant rate"), _LONG_RUN),),
    claims=(Claim("a trust region holds what no trust region loses", _DEFAULT, "pg_is", "final"),),
)
_REAL_MODEL_3 = Experiment(
    "real_model3",
    "Verdicts of the wind tunnel on SmolLM2-135M-Instruct: staleness, and rounded weights in the engine",
    blocks=(
        # The first two blocks share their runs with ``real_model``. With INT4 weights two losses hardly learn.
        Block(REAL_MODEL, _REAL_LOSSES, ("none", "staleness 4", "weights int8"), {}),
        Block(REAL_MODEL, _REAL_LOSSES[:2], ("weights int4",), {}),
        Block(REAL_MODEL, (*_REAL_LOSSES, "drpo/12.5"), ("staleness 16",), {}),
        Block(REAL_MODEL, ("drpo/12.5", *_REAL_QUESTIONS), ("staleness 4",), {}),
    ),
    quick=(Block(REAL_MODEL, _REAL_LOSSES, ("staleness 16",), {"run": {"num_steps": 5}}),),
    claims=(
        *_REAL_MODEL.claims,
        Claim("DRPO with its authors' delta learns faster than a hard mask", "drpo/12.5", _DEFAULT),
        Claim("Top-K learns faster than Binary", "dppo_topk_tv cap 5", _DEFAULT),
        Claim("centering helps DPPO", "dppo_binary_tv centered", _DEFAULT),
        Claim("a delta of 0.6 learns faster than the default of 0.15", "dppo_binary_tv 0.6", _DEFAULT),
        Claim("the default of 0.15 learns faster than a delta of 0.05", _DEFAULT, "dppo_binary_tv 0.05"),
    ),
    seeds=(0, 1, 2),
)
_REAL_MIXTURE = Experiment(
    "real_mixture",
    "The same verdicts on SmolLM2 as a mixture of four experts",
    blocks=(
        Block(REAL_MIXTURE, _REAL_LOSSES, ("staleness 4",), {}),
        Block(REAL_MIXTURE, _REAL_LOSSES[:2], ("weights int8",), {}),
    ),
    quick=(Block(REAL_MIXTURE, _REAL_LOSSES[:2], ("staleness 4",), {"run": {"num_steps": 2}}),),
    claims=_REAL_MODEL.claims,
    seeds=(0, 1, 2),
)
EXPERIMENTS: Mapping[str, Experiment] = {
    e.name: e
    for e in (
        *(_WINDTUNNEL, THIRD_EDITION, _STABILITY, _RELAXED, _BAD, _RATIO_CAP, _LONG_TAIL, _PRECISION),
        *(_REAL_MODEL, _REAL_MODEL_3, _REAL_MIXTURE, _REAL_MODEL_END),
    )
}
