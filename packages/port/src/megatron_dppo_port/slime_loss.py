"""Rules for slime's loss, advantages and penalties."""

from megatron_dppo_port.converters import flag, integer, nonzero, number, text
from megatron_dppo_port.draft import Draft, UnreadSettingError
from megatron_dppo_port.verl_loss import kl_estimator

_ADVANTAGES = {"grpo": "std", "gspo": "std", "cispo": "std", "reinforce_plus_plus": "none"}
_ADVANTAGES["reinforce_plus_plus_baseline"] = "mean"
_ANCHOR = "pi / mu, from the log-probabilities of the rollout"


def combine_loss(draft: Draft) -> None:
    """Translate the loss with its limits and its aggregation, the advantages and the penalties."""
    with draft.target("loss.name"):
        _loss(draft)
    _aggregation(draft)
    with draft.target("train.advantage"):
        _advantage(draft)
    _penalties(draft)
    _balance(draft)


def _loss(draft: Draft) -> None:
    kind = draft.read("loss-type", text)
    if kind != "policy_loss":
        path = draft.read("custom-loss-function-path", text)
        raise UnreadSettingError("loss-type", f"{kind} {path or ''}: choose a loss of docs/losses/README.md".strip())
    if draft.read("use-opsm", flag):
        raise UnreadSettingError("use-opsm", "a sequence mask; choose a loss of docs/losses/README.md")
    estimator = draft.read("advantage-estimator", text)
    if estimator == "cispo":
        draft.put("loss.name", "cispo", "advantage-estimator", note=_ANCHOR)
        with draft.target("loss.ratio_floor"):
            floor = 1 - draft.read("eps-clip", number)
            draft.put("loss.ratio_floor", floor if floor > 0 else None, "eps-clip")
        with draft.target("loss.ratio_cap"):
            draft.put("loss.ratio_cap", 1 + _upper(draft), *_upper_key(draft))
        return
    is_corrected = draft.read("use-tis", flag) or False
    name = "gspo" if estimator == "gspo" else "ppo_decoupled" if is_corrected else "ppo_clip"
    note = "the old policy is recomputed" if name == "ppo_decoupled" else _ANCHOR
    draft.put("loss.name", name, note=note)
    draft.translate("eps-clip", "loss.clip_ratio_low", number)
    with draft.target("loss.clip_ratio_high"):
        draft.put("loss.clip_ratio_high", _upper(draft), *_upper_key(draft))
    if name != "gspo":
        draft.translate("eps-clip-c", "loss.dual_clip", number)
    if is_corrected:
        with draft.target("loss.mismatch", "loss.mismatch_low", "loss.mismatch_high"):
            _correction(draft, name)


def _upper_key(draft: Draft) -> tuple[str, ...]:
    return ("eps-clip-high",) if draft.has("eps-clip-high") else ("eps-clip",)


def _upper(draft: Draft) -> float:
    """Return the upper limit. slime uses the lower one where it is not set."""
    high = draft.read("eps-clip-high", number)
    return float(draft.read("eps-clip", number) if high is None else high)


def _correction(draft: Draft, name: str) -> None:
    if draft.read("custom-tis-function-path", text) is not None:
        raise UnreadSettingError("custom-tis-function-path", "a function of its own; see loss.mismatch")
    if name == "gspo":
        raise UnreadSettingError("use-tis", "GSPO here compares with the rollout's own log-probabilities")
    draft.put("loss.mismatch", "truncate", "use-tis")
    draft.put("loss.mismatch_high", draft.read("tis-clip", number), "tis-clip")
    draft.put("loss.mismatch_low", draft.read("tis-clip-low", nonzero), "tis-clip-low")


def _aggregation(draft: Draft) -> None:
    """Translate the mean over tokens. Without the flag slime takes the mean of each sample, then of the samples."""
    key = "calculate-per-token-loss"
    with draft.target("loss.aggregation"):
        if draft.read("custom-pg-loss-reducer-function-path", text) is not None:
            raise UnreadSettingError(
                "custom-pg-loss-reducer-function-path", "a reducer of its own; see loss.aggregation"
            )
        if draft.read(key, flag):
            if draft.get("loss.name") == "gspo":
                raise UnreadSettingError(key, "GSPO here is defined with seq_mean_token_mean; remove the key to use it")
            draft.put("loss.aggregation", "token_mean", key)
        else:
            draft.put(
                "loss.aggregation", "seq_mean_token_mean", note=f"{draft.version}'s mean per sample, without --{key}"
            )


def _advantage(draft: Draft) -> None:
    estimator = draft.read("advantage-estimator", text)
    if estimator not in _ADVANTAGES:
        reason = f"no estimator here is slime's {estimator!r}: there is no critic; choose train.advantage"
        raise UnreadSettingError("advantage-estimator", reason)
    kind = _ADVANTAGES[estimator]
    # slime does not divide by the spread of a group of one.
    is_single = draft.read("n-samples-per-prompt", integer) == 1
    if kind == "std" and (is_single or draft.read("disable-grpo-std-normalization", flag)):
        kind = "mean"
    if kind != "none" and draft.read("disable-rewards-normalization", flag):
        kind = "none"
    sources = ("disable-grpo-std-normalization", "disable-rewards-normalization")
    draft.put("train.advantage", kind, "advantage-estimator", *(key for key in sources if draft.has(key)))
    if draft.read("normalize-advantages", flag):
        draft.put("train.advantage_normalization", "batch", "normalize-advantages")
    elif estimator.startswith("reinforce"):
        draft.put("train.advantage_normalization", "batch", note="REINFORCE++")


def _balance(draft: Draft) -> None:
    """Translate the load-balancing loss and the bias update of the routers, which add to the gradient if above 0."""
    path = "model.transformer.moe_aux_loss_coeff"
    with draft.target(path):
        value = draft.read("moe-aux-loss-coeff", nonzero)
        draft.put(path, value, "moe-aux-loss-coeff")
        if value:
            kind = draft.read("moe-router-load-balancing-type", text) or "aux_loss"
            draft.put("model.transformer.moe_router_load_balancing_type", kind, "moe-router-load-balancing-type")
    for key in ("moe-z-loss-coeff", "moe-router-bias-update-rate"):
        draft.translate(key, f"model.transformer.{key.replace('-', '_')}", nonzero)


def _penalties(draft: Draft) -> None:
    with draft.target("loss.kl_coef", "loss.kl_estimator"):
        value = draft.read("kl-loss-coef", number)
        if draft.read("use-kl-loss", flag) and value:
            draft.put("loss.kl_coef", value, "kl-loss-coef", "use-kl-loss")
            draft.translate("kl-loss-type", "loss.kl_estimator", kl_estimator)
    draft.translate("kl-coef", "reward.kl_coef", nonzero)
    for key in ("use-kl-loss", "kl-loss-coef", "kl-loss-type", "kl-coef"):
        if key in draft.source and draft.source[key].unread is None:
            draft.record(key, "ported", "no penalty")
