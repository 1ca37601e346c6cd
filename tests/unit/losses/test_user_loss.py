"""A user's own loss, mask and advantage: equal to what they write once more, and every bad return a clear error."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo import LossInputs, TokenTargets, dppo_head_loss
from megatron_dppo.advantages.by_name import advantages_by
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import FunctionError
from megatron_dppo.losses import policy_loss, policy_objective, with_cosines
from megatron_dppo.losses.user_check import check_user_functions, made_up_inputs
from megatron_dppo.losses.user_loss import UserLoss

EXAMPLES = Path(__file__).parents[3] / "examples/losses"
OWN = Path(__file__).parents[2] / "distributed/user_functions.py"
TOPK = 3
THRESHOLD = {"divergence_threshold_low": 0.05, "divergence_threshold_high": 0.05}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "binary": (
        {"name": f"{EXAMPLES}/dppo.py:binary_tv", "options": {"threshold": 0.05}},
        {"name": "dppo_binary_tv"} | THRESHOLD,
    ),
    "class": (
        {"name": f"{EXAMPLES}/dppo.py:BinaryTV", "threshold": 0.05},
        {"name": "dppo_binary_tv"} | THRESHOLD,
    ),
    "topk": (
        {"name": f"{EXAMPLES}/dppo.py:topk_total_variation", "options": {"threshold": 0.05}, "topk": TOPK},
        {"name": "dppo_topk_tv", "topk": TOPK} | THRESHOLD,
    ),
    "centered": (
        {"name": f"{OWN}:centered", "options": {"cap": 2.0}, "topk": TOPK},
        {"name": "score_centering", "topk": TOPK},
    ),
    "penalised": (
        {"name": f"{OWN}:penalised", "options": {"coefficient": 0.2}, "entropy_coef": 0.1},
        {"name": "pg_is", "kl_coef": 0.2, "kl_target": "rollout", "entropy_coef": 0.1},
    ),
    "mask": (
        {"name": "grpo", "mask": f"{OWN}:ratio_mask", "mask_options": {"low": 0.5, "high": 2.0}},
        {"name": "grpo", "mismatch": "mask_sequence"},
    ),
}
"""A user's -> the built-in one."""


def gradients(config: LossConfig, **changes: Any) -> tuple[Any, list[Tensor]]:
    inputs = made_up_inputs(TOPK)
    leaves = [x.double().requires_grad_() for x in (inputs.logprobs, inputs.entropy, inputs.topk_logprobs)]  # type: ignore[union-attr]
    inputs = replace(inputs, logprobs=leaves[0], entropy=leaves[1], topk_logprobs=leaves[2], **changes)
    output = policy_loss(inputs, config, counterfactuals=True)
    result = torch.autograd.grad(output.loss_sum, leaves, allow_unused=True)
    return output, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, result, strict=True)]


@pytest.mark.parametrize(("own", "built_in"), PAIRS.values(), ids=PAIRS.keys())
def test_a_user_loss_equals_the_built_in_loss_that_it_copies(own: dict[str, Any], built_in: dict[str, Any]) -> None:
    (mine, of_mine), (theirs, of_theirs) = gradients(LossConfig(**own)), gradients(LossConfig(**built_in))
    for result, expected in zip(of_mine, of_theirs, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)
    assert any(bool(x.any()) for x in of_theirs)
    if "penalised" not in str(own["name"]):
        assert torch.equal(mine.keep_mask, theirs.keep_mask) and mine.num_tokens == theirs.num_tokens
    name = "counterfactual/grpo/cosine"
    cosines = [
        with_cosines({k: float(m.numerator / m.denominator) for k, m in o.metrics.items()}) for o in (mine, theirs)
    ]
    if "penalised" not in str(own["name"]):  # the built-in one leaves its penalty out
        assert cosines[0][name] == pytest.approx(cosines[1][name], rel=1e-6)


@pytest.mark.parametrize("name", ["binary", "class", "topk", "centered", "penalised"])
@pytest.mark.parametrize("chunk", [3, None])
def test_in_the_fused_head_the_gradient_is_that_of_the_built_in_one(name: str, chunk: int | None) -> None:
    """Per token in chunks, hidden states to weight; bit for bit but for the order of the rows."""
    x, vocabulary = made_up_inputs(TOPK), TOPK + 5
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 6, generator=generator) for n in (x.loss_mask.numel(), vocabulary))
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[: TOPK + 1] for _ in hidden]).int()
    targets = TokenTargets(
        labels=ids[:, TOPK].long(),
        advantages=x.advantages,
        loss_mask=x.loss_mask,
        rollout_logprobs=x.rollout_logprobs,
        rollout_topk_ids=ids,
        rollout_topk_logprobs=x.rollout_topk_logprobs,
    )
    result = []
    for settings in PAIRS[name]:
        config = LossConfig(**settings)
        objective = policy_objective(config)
        assert objective.by_token
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        options: dict[str, Any] = {"group": None, "vocab_size": vocabulary, "chunk_tokens": chunk}
        dppo_head_loss(*leaves, targets, objective.loss, needs=objective.needs, **options).loss_sum.backward()
        result.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*result, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert bool(result[0][0].any())


def test_rows_without_advantage_are_skipped_only_if_the_loss_declares_it() -> None:
    assert policy_objective(LossConfig(**PAIRS["binary"][0])).skips_zero_advantage
    assert not policy_objective(LossConfig(**PAIRS["penalised"][0])).skips_zero_advantage
    assert not policy_objective(LossConfig(**PAIRS["mask"][0])).by_token


def test_a_user_weight_multiplies_the_term_only() -> None:
    plain = LossConfig(name="cispo")
    own = LossConfig(name="cispo", mask=f"{EXAMPLES}/parts.py:confident_less", mask_options={"power": 2.0})
    mu = made_up_inputs(TOPK).rollout_logprobs.double().exp()  # type: ignore[union-attr]
    torch.testing.assert_close(gradients(own)[1][0], (1 - mu) ** 2 * gradients(plain)[1][0], rtol=1e-6, atol=1e-8)


def test_the_example_mask_masks_sequences_by_their_mean_change() -> None:
    inputs = made_up_inputs(TOPK)
    output, _ = gradients(LossConfig(name="pg_is", mask=f"{EXAMPLES}/parts.py:near_sequences"))
    moved = (inputs.logprobs.exp() - inputs.rollout_logprobs.exp()).abs()  # type: ignore[union-attr]
    ids = inputs.sequence_ids
    means = [float(moved[(ids == i) & inputs.loss_mask].mean()) for i in range(3)]
    assert len({mean <= 0.1 for mean in means}) == 2, f"one side only: {means}"
    for i, mean in enumerate(means):
        kept = output.keep_mask[(ids == i) & inputs.loss_mask]
        assert bool(kept.all()) == bool(kept.any()) == (mean <= 0.1)


def write(folder: Path, body: str, name: str = "own.py") -> Path:
    file = folder / name
    file.write_text(
        "import torch\nfrom megatron_dppo.losses import needs\nterm = lambda x: -x.advantages * x.logprobs\n" + body
    )
    return file


CLASS = """
from megatron_dppo import losses
class Mine(losses.Loss):
    width: float = 0.5
    def decide(self, tokens):
        BODY
"""


def test_the_keys_of_a_class_are_checked_as_those_of_a_built_in_loss(tmp_path: Path) -> None:
    name = f"{write(tmp_path, CLASS.replace('BODY', 'return losses.weigh_by_ratio(tokens, tokens.log_ratio)'))}:Mine"
    config = LossConfig(name=name, width=0.25, kl_coef=0.1, kl_target="rollout")
    assert config.width == 0.25 and LossConfig(**config.model_dump()) == config  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(config)) == config
    check_user_functions(config)
    with pytest.raises(ValueError, match="wdth"):
        LossConfig(name=name, wdth=0.25)
    with pytest.raises(ValueError, match=r"clip_ratio_low = 0\.1 has no effect"):
        LossConfig(name=name, clip_ratio_low=0.1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return tokens.nothing", "raised AttributeError: .*nothing"),
        (
            "return losses.weigh_by_ratio(tokens, tokens.log_ratio, tokens.log_ratio > tokens.log_ratio.mean())",
            "gradient of a token",
        ),
    ],
)
def test_an_invalid_loss_class_is_refused(body: str, message: str, tmp_path: Path) -> None:
    config = LossConfig(name=f"{write(tmp_path, CLASS.replace('BODY', body))}:Mine")
    with pytest.raises(FunctionError, match=message):
        check_user_functions(config)


BAD_LOSSES = {
    "def f(x): return term(x).sum()": r"returned a tensor \[\], expected \[16\]: a term for each token, not their sum",
    "def f(x): return 0.5": r"returned float, expected a tensor \[16\]",
    "def f(x): return (term(x) > 0)": "returned torch.bool, expected a float",
    "def f(x): return term(x), term(x)": "returned torch.float32 as its second value, expected a bool",
    "def f(x): return term(x).detach()": "returned terms without a gradient",
    "def f(x): return term(x) / 0": "returned .*(inf|nan) for .* of 13 tokens; the first has logprobs -",
    "def f(x): raise KeyError('no')": r"raised KeyError: 'no' \(.*own.py, line 4\)",
    "def f(x): return x.topk_logprobs.sum(-1)": "raised AttributeError: 'NoneType'",
    "def f(x): x.advantages.neg_(); return term(x)": "modifies inputs.advantages in place.* clone",
    "def f(x): x.loss_mask.fill_(True); return term(x)": "modifies inputs.loss_mask in place",
    "def f(x): x.rollout_logprobs[2] = 0; return term(x)": "modifies inputs.rollout_logprobs in place",
    "def f(x): return term(x) + x.logprobs.sub_(1).exp()": "modifies inputs.logprobs in place|raised RuntimeError",
    "def f(x): raise SystemExit(0)": r"raised SystemExit: 0 \(.*own.py, line 4\)",
    "def f(x): return term(x).to('meta')": "returned a tensor on meta .* expected one on cpu",
    "def f(x): return term(x).to_sparse()": "torch.sparse_coo.* expected one on cpu .torch.strided",
    "def f(x): return term(x) + (x.logprobs - x.logprobs.detach()).sqrt()": "to logprobs that is not finite",
    "def f(x): return term(x) / x.loss_mask.sum()": "of a token depends on the other tokens .*sequences=True",
    "def f(x): return term(x) * torch.rand_like(x.logprobs)": "or changes from call to call",
    "@needs(sequences=True)\ndef f(x): return term(x) / x.loss_mask.sum()": "depends on the other sequences of",
    "@needs(zero_advantage=False)\ndef f(x): return x.logprobs": "declares zero_advantage = False, but has a gradient",
}


@pytest.mark.parametrize(("body", "message"), BAD_LOSSES.items())
def test_an_invalid_user_loss_is_refused_before_the_run(body: str, message: str, tmp_path: Path) -> None:
    name = f"{write(tmp_path, body)}:f"
    with pytest.raises(FunctionError, match=f"(?s)loss.name = '{name}'.*{message}"):
        check_user_functions(LossConfig(name=name))


BAD_MASKS = {
    "def f(x): return x.advantages.long()": "returned torch.int64, expected a bool",
    "def f(x): return x.advantages / 0": "returned .*(nan|inf) for",
    "def f(x): x.advantages.neg_(); return x.loss_mask": "modifies inputs.advantages in place",
    "def f(x): raise SystemExit": "raised SystemExit",
    "def f(x): return x.loss_mask.to('meta')": "returned a tensor on meta",
    "def f(x): return x.advantages[1:]": r"returned a tensor \[15\], expected \[16\]",
    "def f(x): return (x.logprobs < x.logprobs.mean())": "depends on the other tokens of the call",
}


@pytest.mark.parametrize(("body", "message"), BAD_MASKS.items())
def test_an_invalid_user_mask_is_refused_before_the_run(body: str, message: str, tmp_path: Path) -> None:
    name = f"{write(tmp_path, body)}:f"
    with pytest.raises(FunctionError, match=f"(?s)loss.mask = '{name}'.*{message}"):
        check_user_functions(LossConfig(name="pg_is", mask=name))


@pytest.mark.parametrize("own", [pair[0] for pair in PAIRS.values()], ids=PAIRS.keys())
def test_good_functions_pass(own: dict[str, Any]) -> None:
    check_user_functions(LossConfig(**own))


BAD_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("", {"name": "FILE:f"}, "loss.name = '.*' cannot be imported: AttributeError: .*own.py has no 'f'; it has .*term"),
    ("", {"name": "FILE:f:g"}, "has more than one ':'; expected 'path/to/file.py:function'"),
    ("oops(", {"name": "FILE:f"}, "cannot be imported: SyntaxError"),
    ("def f(x): ...", {"name": "nowhere.py:f"}, "nowhere.py does not exist.*command line to the working"),
    ("f = 1", {"name": "FILE:f"}, "is not callable, but int"),
    ("def f(): ...", {"name": "FILE:f"}, r"is called as f\(inputs\), but has the parameters \(\)"),
    ("def f(x, *, c): ...", {"name": "FILE:f"}, r"missing a required .*argument: 'c'"),
    ("def f(x, *, c): ...", {"name": "FILE:f", "options": {"d": 1}}, r"f\(inputs, d=...\).*parameters \(x, \*, c\)"),
    ("def f(x): ...", {"name": "FILE:f", "ratio_cap": 2.0}, "ratio_cap = 2.0 has no effect"),
    ("def f(x): ...", {"name": "FILE:f", "topk": 3}, "topk = 3 has no effect"),
    ("def f(x): ...", {"name": "FILE:f", "form": "ratio"}, "form = ratio has no effect"),
    ("def f(x): ...", {"name": "grpo", "options": {"a": 1}}, "options = {'a': 1} has no effect"),
    ("def f(x): ...", {"name": "grpo", "mask_options": {"a": 1}}, "mask_options = {'a': 1} has no effect"),
    ("@needs(zero_advantage=False)\ndef f(x): ...", {"mask": "FILE:f"}, "a mask has no gradient"),
    ("@needs(topk_gradient=True)\ndef f(x): ...", {"name": "FILE:f"}, "need topk = True"),
    ("@needs(top=True)\ndef f(x): ...", {"name": "FILE:f"}, "unexpected keyword argument 'top'"),
    ("def f(x): ...\nf.function_needs = {}", {"name": "FILE:f"}, "declare its needs with the decorator"),
    ("", {"name": "dppo_binary"}, "unknown loss; did you mean 'dppo_binary_"),
]


@pytest.mark.parametrize(("body", "keys", "message"), BAD_SETTINGS)
def test_settings_that_a_function_cannot_use_are_refused(
    body: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = write(tmp_path, body)
    keys = {key: value.replace("FILE", str(file)) if isinstance(value, str) else value for key, value in keys.items()}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        LossConfig(**keys)


def test_a_changed_file_is_loaded_again_with_the_next_configuration(tmp_path: Path) -> None:
    file = write(tmp_path, "def f(x): return term(x)")
    first = LossConfig(name=f"{file}:f")
    write(tmp_path, "@needs(topk=True)\ndef f(x): return term(x)")
    assert not first.is_topk and LossConfig(name=f"{file}:f", topk=5).is_topk


def test_a_missing_topk_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"needs topk_logprobs because of loss.name"):
        policy_loss(replace(made_up_inputs(TOPK), topk_logprobs=None), LossConfig(**PAIRS["topk"][0]))
    with pytest.raises(FunctionError, match="needs topk_logprobs with a gradient"):
        inputs = made_up_inputs(TOPK)
        policy_loss(replace(inputs, logprobs=inputs.logprobs.requires_grad_()), LossConfig(**PAIRS["centered"][0]))


def test_user_defined_advantages() -> None:
    rewards = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 9.0]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    result = advantages_by(f"{EXAMPLES}/parts.py:over_range", rewards, valid)
    torch.testing.assert_close(result, torch.tensor([[-1.0, -1 / 3, 1.0], [0.0, 0.0, 0.0]]))
    assert torch.allclose(advantages_by("mean", rewards[:1], valid[:1]), torch.tensor([[-4.0, -1.0, 5.0]]) / 3)


def test_invalid_user_advantages_are_refused(tmp_path: Path) -> None:
    rewards, valid = torch.tensor([[0.0, 1.0], [3.0, 5.0]]), torch.ones(2, 2, dtype=torch.bool)
    for number, (body, message) in enumerate(
        {
            "def f(r, v): return (r - r.mean()) / r.std()": "they must depend on that group only",
            "def f(r, v): return r.mean(1)": r"returned torch.float32 \[2\], expected a float tensor \[2, 2\]",
            "def f(r, v): return r / 0": "expected finite",
            "def f(r, v): return r[7]": "raised IndexError",
            "def f(r, v): raise SystemExit(0)": "raised SystemExit",
            "def f(r, v): return r.to('meta')": "returned a tensor on meta",
            "def f(r, v, groups): return r + torch.tensor([[len(g)] for g in groups])": None,
        }.items()
    ):
        name = f"{write(tmp_path, body, f'own{number}.py')}:f"
        TrainConfig(advantage=name)
        if message is None:
            result = advantages_by(name, rewards, valid, groups=["ab", "c"])  # type: ignore[list-item]
            assert result.tolist() == [[2.0, 3.0], [4.0, 6.0]]
            continue
        with pytest.raises(FunctionError, match=f"train.advantage = '{name}'.*{message}"):
            advantages_by(name, rewards, valid)
    with pytest.raises(ValueError, match=r"expected 'mean', 'std', .*'gdpo', 'remax', 'none' or 'path"):
        TrainConfig(advantage="median")
    with pytest.raises(ValueError, match="advantage = 'std'"):
        TrainConfig(advantage="std", advantage_options={"a": 1})
    with pytest.raises(ValueError, match=r"missing a required .*argument: 'c'"):
        TrainConfig(advantage=f"{write(tmp_path, 'def f(r, v, c): return r', 'c.py')}:f")


def test_a_function_receives_exactly_the_inputs_that_it_declares(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "seen = []\n@needs(topk=True, topk_other_square=True, recomputed=True, reference=True, entropy_gradient=True)\n"
        "def f(x):\n    seen.append(x)\n    return term(x) + 0 * x.entropy\n"
        "def g(x):\n    seen.append(x)\n    return term(x)\n",
    )
    for function, fields in (("f", True), ("g", False)):
        name = f"{file}:{function}"
        config = LossConfig(name=name, topk=TOPK) if fields else LossConfig(name=name)
        gradients(config)
        assert isinstance(config, UserLoss)
        got: LossInputs = config.user_loss.function.__globals__["seen"][-1]
        for field in ("topk_valid", "topk_other_square", "recomputed_logprobs", "reference_logprobs"):
            assert (getattr(got, field) is not None) == fields
        assert got.sequence_ids is None and bool(got.logprobs[~got.loss_mask].eq(0).all())
        assert got.entropy is not None and got.entropy.requires_grad == fields
        if fields:
            assert got.topk_valid is not None and got.topk_logprobs is not None
            assert bool((got.topk_logprobs[~got.topk_valid] == -torch.inf).all())
            assert not bool(got.topk_valid[~got.loss_mask].any())


DECLARED = {
    "rollout_logprobs": "",
    "advantages": "",
    "recomputed_logprobs": "@needs(recomputed=True)",
    "reference_logprobs": "@needs(reference=True)",
    "topk_other_square": "@needs(topk=True, topk_other_square=True)",
}
"""Fields that a function may read, and its declaration."""


def test_each_declared_field_has_its_values(tmp_path: Path) -> None:
    """The gradient of log pi times a field is that field; no two fields of the made-up inputs are equal."""
    inputs = made_up_inputs(TOPK)
    for field, declaration in DECLARED.items():
        file = write(tmp_path, f"{declaration}\ndef f(x): return x.logprobs * x.{field}\n", f"{field}.py")
        options: dict[str, Any] = {"topk": TOPK} if "topk" in declaration else {}
        _, (result, *_) = gradients(LossConfig(name=f"{file}:f", **options))
        expected = torch.where(inputs.loss_mask, getattr(inputs, field).double(), 0.0)
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)


def test_a_gradient_that_was_not_declared_does_not_reach_the_model(tmp_path: Path) -> None:
    body = "@needs(topk=True{})\ndef f(x): return term(x) + x.topk_logprobs.exp().sum(-1) + x.entropy\n"
    other = made_up_inputs(TOPK).topk_other_logprob
    assert other is not None
    for declaration, topk, entropy in (
        ("", False, False),
        (", topk_gradient=True", True, False),
        (", entropy_gradient=True", False, True),
    ):
        file = write(tmp_path, body.format(declaration), f"g{len(declaration)}.py")
        leaf = other.clone().requires_grad_()
        output, result = gradients(LossConfig(name=f"{file}:f", topk=TOPK), topk_other_logprob=leaf)
        assert bool(result[0].any())
        assert (bool(result[2].any()), bool(result[1].any())) == (topk, entropy)
    body = "@needs(topk=True)\ndef f(x): return term(x) + x.topk_other_logprob + x.rollout_topk_logprobs[:, 0]\n"
    leaves = [other.clone().requires_grad_(), made_up_inputs(TOPK).rollout_topk_logprobs.clone().requires_grad_()]  # type: ignore[union-attr]
    inputs = replace(made_up_inputs(TOPK), topk_other_logprob=leaves[0], rollout_topk_logprobs=leaves[1])
    logprobs = inputs.logprobs.clone().requires_grad_()
    output = policy_loss(
        replace(inputs, logprobs=logprobs), LossConfig(name=f"{write(tmp_path, body, 'o.py')}:f", topk=TOPK)
    )
    result = torch.autograd.grad(output.loss_sum, [logprobs, *leaves], allow_unused=True)
    assert bool(result[0].any()) and result[1] is None and result[2] is None


def test_counterfactual_cosines_of_a_loss_with_a_weight_are_those_of_the_two_gradients(tmp_path: Path) -> None:
    mask = f"{write(tmp_path, 'def m(x): return x.rollout_logprobs.exp() + (x.advantages > 0)', 'm.py')}:m"
    weights = torch.rand(made_up_inputs(TOPK).loss_mask.numel(), generator=torch.Generator().manual_seed(0))
    user = f"{write(tmp_path, 'def f(x): return term(x) * 0.5')}:f"
    for name in ("pg_is", "grpo", user):
        output, (mine, *_) = gradients(LossConfig(name=name, mask=mask), token_weights=weights)
        result = with_cosines({k: float(m.numerator / m.denominator) for k, m in output.metrics.items()})
        for other in ("pg_is", "grpo", "dppo_binary_tv"):
            _, (theirs, *_) = gradients(LossConfig(name=other), token_weights=weights)
            cosine = torch.nn.functional.cosine_similarity(mine, theirs, dim=0)
            assert result[f"counterfactual/{other}/cosine"] == pytest.approx(float(cosine), rel=1e-6)
            assert 0.1 < cosine < 0.999
