"""Rules for verl's loss, advantages and penalties."""

from megatron_dppo_port.converters import flag, integer, number, text
from megatron_dppo_port.draft import Draft, UnreadSettingError

_A, _C = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
_MODE = _A + "policy_loss.loss_mode"
_LOW = _A + "clip_ratio_low"
_HIGH = _A + "clip_ratio_high"
_CAP = _A + "clip_ratio_c"
_ESTIMATOR, _SCALED = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
_ADVANTAGES = {
    "grpo": "std",
    "grpo_vectorized": "std",
    "rloo": "leave_one_out",
    "rloo_vectorized": "leave_one_out",
    "opo": "opo",
    "remax": "remax",
    "reinforce_plus_plus": "none",
    "reinforce_plus_plus_baseline": "mean",
}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
_FIXED_AGGREGATIONS = {
    "verl/gspo": "gspo.loss_agg_mode",
    "sapo": "sapo.loss_agg_mode",
    "gmpo": "geo_mean.loss_agg_mode",
}
"""Entries of the version's defaults for losses that ignore ``loss_agg_mode``."""
_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_estimator(name: object) -> str:
    """Parse the name of a KL estimator in verl and slime."""
    return _KL_ESTIMATORS[text(name)]


def combine_loss(draft: Draft) -> None:
    """Translate the loss with its limits and its aggregation, the advantages and the penalties."""
    with draft.target("loss.name"):
        _loss(draft)
    _aggregation(draft)
    _advantage(draft)
    _penalties(draft)


def _limit(draft: Draft, key: str) -> float:
    """Return a limit of the ratio. ``null`` stands for ``clip_ratio``, as in verl."""
    value = draft.read(key, number)
    if value is None:
        value = draft.read(_A + "clip_ratio", number)
        draft.record(_A + "clip_ratio", "ported", "the limit where clip_ratio_low or clip_ratio_high is null")
    if value is None:
        raise UnreadSettingError(key, "null, and clip_ratio is not set")
    return float(value)


def _loss(draft: Draft) -> None:
    mode = draft.read(_MODE, text)
    if mode in ("dppo_tv", "dppo_kl"):
        draft.put("loss.name", f"verl/{mode}", _MODE)
        if draft.read(_C + "bypass_mode", flag):
            # In 0.9.1: v1/trainer_base.py copies the anchor. The legacy trainer and the separate ones also overwrite
            # loss_mode, in the driver's copy of the configuration, which the actors do not read.
            draft.record(_C + "bypass_mode", "ported", "the anchor is the rollout's own log-probability, as here")
        _put_limits(draft, "loss.divergence_threshold_low", "loss.divergence_threshold_high")
        draft.translate(_CAP, "loss.ratio_cap", number)
    elif mode == "vanilla":
        _vanilla(draft)
    elif mode == "gspo":
        draft.put("loss.name", "verl/gspo", _MODE)
        _put_limits(draft, "loss.clip_ratio_low", "loss.clip_ratio_high")
    elif mode == "cispo":
        draft.put("loss.name", "cispo", _MODE)
        with draft.target("loss.ratio_floor"):
            floor = 1 - _limit(draft, _LOW)
            draft.put("loss.ratio_floor", floor if floor > 0 else None, _LOW)
        with draft.target("loss.ratio_cap"):
            draft.put("loss.ratio_cap", 1 + _limit(draft, _HIGH), _HIGH)
    elif mode == "geo_mean":
        draft.put("loss.name", "gmpo", _MODE)
        _put_limits(draft, "loss.log_clip_low", "loss.log_clip_high")
    elif mode == "sapo":
        draft.put("loss.name", "sapo", _MODE)
        draft.translate(_A + "tau_pos", "loss.gate_temperature_high", number)
        draft.translate(_A + "tau_neg", "loss.gate_temperature_low", number)
    else:
        raise UnreadSettingError(_MODE, f"no loss here is verl's {mode!r}; choose one of docs/losses/README.md")
    if draft.get("loss.mismatch") is None:
        _correction(draft)


def _vanilla(draft: Draft) -> None:
    """Translate the clipped loss, with a truncated correction for the mismatch if it has one."""
    level, limit = _C + "rollout_is", _C + "rollout_is_threshold"
    if draft.read(_C + "bypass_mode", flag) and draft.read(_C + "loss_type", text) not in (None, "ppo_clip"):
        raise UnreadSettingError(_C + "loss_type", "no exact counterpart of the bypass loss; see pg_is in docs/losses")
    # With ``bypass_mode`` verl's old policy is the rollout's, so there is nothing to correct.
    is_corrected = not draft.read(_C + "bypass_mode", flag) and draft.read(level, text) == "token"
    normalized = draft.read(_C + "rollout_is_batch_normalize", flag)
    if is_corrected and not normalized and not draft.read(_C + "rollout_rs", text):
        draft.put("loss.name", "ppo_decoupled", _MODE, level, note="recomputed old policy, truncated correction")
        draft.put("loss.mismatch", "truncate", level, note="rollout_is = token")
        draft.translate(limit, "loss.mismatch_high", number)
    else:
        draft.put("loss.name", "verl/vanilla", _MODE)
    _put_limits(draft, "loss.clip_ratio_low", "loss.clip_ratio_high")
    draft.translate(_CAP, "loss.dual_clip", number)


def _correction(draft: Draft) -> None:
    """Leave corrections without an exact counterpart to the user."""
    with draft.target("loss.mismatch"):
        for name in ("rollout_rs", "rollout_is"):
            value = draft.read(_C + name, text)
            is_in_ratio = name == "rollout_is" and draft.read(_C + "bypass_mode", flag)
            if value is not None and not is_in_ratio:
                reason = f"{value}: no exact counterpart; see loss.mismatch (none, truncate, mask_token, mask_sequence)"
                raise UnreadSettingError(_C + name, reason)


def _put_limits(draft: Draft, low: str, high: str) -> None:
    for path, key in ((low, _LOW), (high, _HIGH)):
        with draft.target(path):
            draft.put(path, _limit(draft, key), key)


def _aggregation(draft: Draft) -> None:
    key, scale = _A + "loss_agg_mode", _A + "loss_scale_factor"
    with draft.target("loss.aggregation"):
        # Some losses have an aggregation of their own, so an unread loss leaves this one open, too.
        draft.read(_MODE, text)
        fixed = _FIXED_AGGREGATIONS.get(draft.get("loss.name"), "")
        mode = draft.defaults.get(fixed)
        if mode is None:
            mode = draft.read(key, text)
        else:
            draft.record(key, "unsupported", f"{draft.version}'s loss always uses {mode}")
        if mode not in _AGGREGATIONS:
            raise UnreadSettingError(key, f"no aggregation here is verl's {mode!r}")
        if draft.get("loss.name") == "verl/gspo" and mode != "seq-mean-token-mean":
            raise UnreadSettingError(
                key, f"{mode}: GSPO here is defined with seq_mean_token_mean; remove the key to use it"
            )
        draft.put("loss.aggregation", _AGGREGATIONS[mode], key)
        if mode.endswith("-norm"):
            with draft.target("loss.horizon"):
                horizon = draft.read(scale, integer)
                if horizon is None:
                    horizon = draft.read("data.max_response_length", integer)
                draft.put("loss.horizon", horizon, scale, note="sums are divided by it")


def _advantage(draft: Draft) -> None:
    with draft.target("train.advantage"):
        estimator = draft.read(_ESTIMATOR, text)
        if estimator not in _ADVANTAGES:
            reason = f"no estimator here is verl's {estimator!r}: there is no critic; choose train.advantage"
            raise UnreadSettingError(_ESTIMATOR, reason)
        kind = _ADVANTAGES[estimator]
        if kind == "std" and not draft.read(_SCALED, flag):
            kind = "mean"
        draft.put("train.advantage", kind, _ESTIMATOR, _SCALED)
        if estimator.startswith("reinforce"):
            draft.put("train.advantage_normalization", "batch", note="REINFORCE++")


def _penalties(draft: Draft) -> None:
    coefficient = _A + "kl_loss_coef"
    kind = _A + "kl_loss_type"
    is_used = _A + "use_kl_loss"
    with draft.target("loss.kl_coef", "loss.kl_estimator"):
        if draft.read(is_used, flag):
            value = draft.read(coefficient, number)
            if value:
                draft.put("loss.kl_coef", value, coefficient, is_used)
                draft.translate(kind, "loss.kl_estimator", kl_estimator)
    in_reward, reward_coefficient = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
    with draft.target("reward.kl_coef"):
        if draft.read(in_reward, flag):
            value = draft.read(reward_coefficient, number)
            draft.put("reward.kl_coef", value or None, reward_coefficient, in_reward)
    for key in (is_used, coefficient, kind, in_reward, reward_coefficient):
        if key in draft.source and draft.source[key].unread is None:
            draft.record(key, "ported", "no penalty")
