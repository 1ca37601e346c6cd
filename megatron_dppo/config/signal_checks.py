"""Checks of the training signal across sections: rewards, advantages, a teacher, an agent.

``Config`` calls them in the order in which problems are reported; the functions below follow that order. Each raises
a ValueError whose text names the change that fixes it.
"""

from megatron_dppo.config.data import DataConfig
from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.model import ModelConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.functions import is_function_name


def check_any_signal(distillation: DistillationConfig, reward: RewardConfig) -> None:
    """Check that something trains the policy."""
    if reward.function == "none" and not distillation.is_enabled:
        raise ValueError(
            "reward.function = 'none' without distillation.teacher_path: there is no training signal. Set a reward "
            "function or a teacher"
        )


def check_distillation(distillation: DistillationConfig, rollout: RolloutConfig, model: ModelConfig) -> None:
    """Check that the teacher's signal fits how responses are sampled."""
    if not distillation.is_enabled:
        return
    if rollout.dynamic_sampling and not distillation.task_reward:
        raise ValueError(
            "rollout.dynamic_sampling = true with distillation.task_reward = false: it discards groups with equal "
            "rewards, but only the teacher gives a signal here. Set dynamic_sampling = false"
        )
    if not distillation.is_exact and not distillation.teacher_urls:
        return
    setting = f"distillation.divergence = {distillation.divergence!r}"
    if distillation.teacher_urls:
        setting = "distillation.teacher_urls"
        if rollout.temperature != 1:
            raise ValueError(
                f"{setting} with rollout.temperature = {rollout.temperature:g}: the teacher's servers return "
                "log-probabilities at temperature 1, the rollout at its own temperature. Set temperature = 1, or "
                "use teacher_path"
            )
    elif not model.fused_head:
        raise ValueError(
            f"{setting} with model.fused_head = false: the fused head computes it chunk by chunk. Set fused_head = "
            "true, or divergence = 'sampled'"
        )
    filters = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for key, off in filters.items():
        if getattr(rollout, key) not in (off, None):
            raise ValueError(
                f"{setting} with rollout.{key} = {getattr(rollout, key)}: the filter leaves only part of the "
                "vocabulary, but the teacher's distribution covers all of it. Remove the filter, or use "
                "teacher_path with divergence = 'sampled'"
            )


def check_agent(agent: AgentConfig, rollout: RolloutConfig, data: DataConfig) -> None:
    """Check that an agent alone produces the responses."""
    if not agent.is_set:
        return
    if rollout.generate is not None:
        raise ValueError(
            f"rollout.generate = {rollout.generate!r} and [agent] both produce the responses; remove one of them"
        )
    if agent.max_running is not None and rollout.engine == "local":
        raise ValueError(
            f"agent.max_running = {agent.max_running} with rollout.engine = 'local': it decodes the turns of all "
            "episodes together, so it would wait forever for episodes that may not start. Remove it"
        )
    for name in ("system_prompt", "apply_chat_template"):
        if getattr(data, name) is not None:
            raise ValueError(
                f"data.{name} has no effect with [agent], because the agent writes the messages itself; remove it, "
                "or put the text into the agent"
            )


def check_credit(agent: AgentConfig, train: TrainConfig, reward: RewardConfig) -> None:
    """Check that rewards of parts of an episode exist and can become advantages."""
    if agent.credit == "episode":
        return
    setting = f"agent.credit = {agent.credit!r}"
    if agent.credit == "turn" and agent.reward != "call":
        raise ValueError(
            f"{setting} with agent.reward = {agent.reward!r}: only an agent that sends its rewards rewards single "
            "responses. Set agent.reward = 'call', or remove agent.credit"
        )
    if agent.credit == "agent" and agent.reward != "environment":
        raise ValueError(
            f"{setting} with agent.reward = {agent.reward!r}: only an environment rewards its agents one by one. Set "
            "agent.environment, or remove agent.credit"
        )
    if train.advantage in ("opo", "gdpo", "remax") or is_function_name(train.advantage):
        raise ValueError(
            f"{setting} with train.advantage = {train.advantage!r}: the advantage of a part of an episode is known for "
            "mean, std, leave_one_out and none alone. Set one of them, or remove agent.credit"
        )
    if reward.kl_coef:
        raise ValueError(
            f"{setting} with reward.kl_coef = {reward.kl_coef}: the penalty replaces the advantages. Use loss.kl_coef "
            "for a penalty in the loss, or remove agent.credit"
        )


def check_agent_parts(agent: AgentConfig, reward: RewardConfig) -> None:
    """Check that an agent gives the parts."""
    if not reward.agent_parts:
        return
    if not agent.is_set or agent.reward == "function":
        raise ValueError(
            f"reward.agent_parts = {reward.agent_parts}, but no agent gives rewards: set agent.reward = 'call', 'exit' "
            "or 'environment', or use [reward.functions.NAME] for several rewards of the run"
        )
    unused = [name for name in ("functions", "format", "overlong_buffer_tokens") if getattr(reward, name)]
    if unused:
        raise ValueError(
            f"reward.agent_parts and reward.{unused[0]}: the agent gives the rewards, so that nothing else is added to "
            "them. Remove one of them"
        )
    if agent.credit != "episode":
        raise ValueError(
            f"reward.agent_parts with agent.credit = {agent.credit!r}: rewards by name are of an episode. Remove one "
            "of them"
        )


def check_reward_parts(reward: RewardConfig, train: TrainConfig, rollout: RolloutConfig, agent: AgentConfig) -> None:
    """Check that rewards have parts to normalize."""
    if train.advantage != "gdpo":
        return
    setting = "train.advantage = 'gdpo'"
    if len(parts := list(reward.part_weights)) < 2:
        raise ValueError(
            f"{setting} normalizes each part of a reward, but {parts[0]!r} is the only one. Set several "
            "[reward.functions.NAME] with a weight, reward.format or reward.overlong_buffer_tokens, or of an agent "
            "reward.agent_parts, or use 'std'"
        )
    if limited := [name for name, function in reward.functions.items() if function.sources]:
        raise ValueError(
            f"{setting} with reward.functions.{limited[0]}.sources: a part of a reward is normalized over all sources. "
            "Remove sources, or use 'std' or 'mean'"
        )
    if rollout.generate is not None:
        raise ValueError(f"{setting} with rollout.generate, which may give rewards without parts. Use 'std' or 'mean'")
    if agent.is_set and agent.reward != "function" and not reward.agent_parts:
        raise ValueError(
            f"{setting} with agent.reward = {agent.reward!r}: the agent gives rewards without parts. Set "
            "reward.agent_parts = {NAME = WEIGHT, ...} and let it give them by name, or use 'std' or 'mean'"
        )
    if reward.kl_coef:
        raise ValueError(
            f"{setting} with reward.kl_coef = {reward.kl_coef}: the penalty is part of no reward function. Use "
            "loss.kl_coef for a penalty in the loss"
        )


def check_greedy_baseline(reward: RewardConfig, train: TrainConfig) -> None:
    """Check that the baseline needs no penalty."""
    if train.advantage != "remax":
        return
    if reward.kl_coef:
        raise ValueError(
            f"train.advantage = 'remax' with reward.kl_coef = {reward.kl_coef}: the greedy response, whose "
            "reward is subtracted, would need a penalty of its own. Use loss.kl_coef for a penalty in the loss"
        )


def check_layer_noise(loss: LossConfig, train: TrainConfig) -> None:
    """Check that the loss reads no statistic of the batch under noise."""
    statistics = loss.update_statistics()
    if statistics and train.layer_noise.std:
        raise ValueError(
            f"loss.name = {loss.name!r} with train.layer_noise.std = {train.layer_noise.std}: its "
            f"{', '.join(statistics)} of the batch would be that of a forward pass without noise. Remove "
            "train.layer_noise, or use another loss"
        )
