"""Rules for verl's engine, rewards, evaluation, length and folders of a run."""

import math

from megatron_dppo_port.converters import flag, integer, items, literal, name_files, number, text
from megatron_dppo_port.derived import put_server_count, put_targets
from megatron_dppo_port.draft import Draft, UnreadSettingError

_R = "actor_rollout_ref.rollout."
_SERVER_FLAGS = {
    "sglang": {
        "tensor_model_parallel_size": "tp-size",
        "data_parallel_size": "dp-size",
        "pipeline_model_parallel_size": "pp-size",
        "gpu_memory_utilization": "mem-fraction-static",
    },
    "vllm": {
        "tensor_model_parallel_size": "tensor-parallel-size",
        "data_parallel_size": "data-parallel-size",
        "pipeline_model_parallel_size": "pipeline-parallel-size",
        "gpu_memory_utilization": "gpu-memory-utilization",
        "max_num_batched_tokens": "max-num-batched-tokens",
        "max_num_seqs": "max-num-seqs",
    },
}
_OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
)
_REWARD_FUNCTION = ("custom_reward_function.", "reward.custom_reward_function.")


def combine_run(draft: Draft) -> None:
    """Translate the settings around the training step."""
    _engine(draft)
    _adapters(draft)
    _reward(draft)
    _evaluation(draft)
    _length(draft)
    _trackers(draft)
    _folder(draft)


def _engine(draft: Draft) -> None:
    # Only verl's asynchronous programs, whose servers have GPUs of their own, have these defaults.
    is_separate = any(key.startswith("async_training.") for key in draft.defaults)
    with draft.target("rollout.engine"):
        engine = draft.read(_R + "name", text)
        if engine is None:
            return
        if engine not in _SERVER_FLAGS:
            raise UnreadSettingError(_R + "name", f"no engine here is verl's {engine!r}; choose vllm or sglang")
        draft.put("rollout.engine", engine, _R + "name")
        if not is_separate:
            draft.put(
                "rollout.servers.colocated", True, note="as in verl's hybrid engine; false = servers on other GPUs"
            )
            draft.put("rollout.weight_sync.method", "ipc", note="servers on the trainer's GPUs")
        for theirs, ours in _SERVER_FLAGS[engine].items():
            draft.translate(_R + theirs, f"rollout.{engine}.{ours}", literal)
    # It has no value only if verl has no default engine and the file names none.
    if draft.get("rollout.engine") is not None:
        with draft.target("rollout.servers.count"):
            _servers(draft, "rollout." if is_separate else "trainer.")


def _servers(draft: Draft, before: str) -> None:
    """Translate the number of servers, which verl derives: as many as its GPUs hold."""
    separate_roles = _R + "disaggregation.enabled"
    if draft.read(separate_roles, flag):
        raise UnreadSettingError(separate_roles, "servers for prefill and servers for decode; here all do both")
    sizes = [_R + f"{name}_parallel_size" for name in ("tensor_model", "data", "pipeline_model")]
    put_server_count(
        draft,
        sizes[0],
        per_node=draft.read(before + "n_gpus_per_node", integer),
        num_nodes=draft.read(before + "nnodes", integer),
        per_server=math.prod(draft.read(key, integer) or 1 for key in sizes),
    )


def _adapters(draft: Draft) -> None:
    for before, rank, alpha in (("lora_", "lora_rank", "lora_alpha"), ("lora.", "lora.rank", "lora.alpha")):
        rank_key, alpha_key = f"actor_rollout_ref.model.{rank}", f"actor_rollout_ref.model.{alpha}"
        with draft.target("lora.rank", "lora.alpha"):
            size = draft.read(rank_key, integer)
            if size:
                draft.put("lora.rank", size, rank_key)
                draft.put("lora.alpha", draft.read(alpha_key, number), alpha_key)
                with draft.target("lora.target_modules"):
                    _adapted_layers(draft, before if before == "lora." else "")
            else:
                for key in (rank_key, alpha_key):
                    draft.record(key, "ported", f"no adapters ({before[:4]})")


def _adapted_layers(draft: Draft, before: str) -> None:
    """Translate the layers that get adapters; ``before`` starts the names of Megatron's backend."""
    model = "actor_rollout_ref.model."
    excluded = draft.read(f"{model}{before}exclude_modules", items)
    if excluded:
        raise UnreadSettingError(f"{model}{before}exclude_modules", f"{excluded}: list the layers that get adapters")
    key = f"{model}{before}target_modules"
    names = draft.read(key, items)
    if names:
        put_targets(draft, names, key)


def _reward(draft: Draft) -> None:
    for before in _REWARD_FUNCTION:
        with draft.target("reward.function"):
            path = draft.read(before + "path", text)
            name = draft.read(before + "name", text) or "compute_score"
            if path:
                draft.put("reward.function", f"{path}:{name}", before + "path", before + "name")
    for before in _OVERLONG:
        with draft.target("reward.overlong_buffer_tokens", "reward.overlong_penalty"):
            if not draft.read(before + "enable", flag):
                continue
            draft.put(
                "reward.overlong_buffer_tokens", draft.read(before + "len", integer), before + "len", before + "enable"
            )
            factor = draft.read(before + "penalty_factor", number)
            draft.put("reward.overlong_penalty", factor, before + "penalty_factor")
        for name in ("log", "len", "penalty_factor"):
            draft.record(before + name, "unsupported", "overlong penalties are always logged")


def _evaluation(draft: Draft) -> None:
    with draft.target("eval.every", "data.eval"):
        every = draft.read("trainer.test_freq", integer)
        if every is None or every <= 0:
            for key in ("trainer.test_freq", "data.val_files"):
                draft.record(key, "unsupported", "trainer.test_freq is not above 0: no evaluation")
            return
        files = draft.read("data.val_files", items)
        if files:
            draft.put("eval.every", every, "trainer.test_freq")
            draft.put("data.eval", files[0] if len(files) == 1 else name_files(files), "data.val_files")


def _length(draft: Draft) -> None:
    steps_key, epochs_key = "trainer.total_training_steps", "trainer.total_epochs"
    if draft.get("run.num_steps") is None:
        with draft.target("run.num_steps"):
            steps = draft.read(steps_key, integer)
            if steps:
                draft.put("run.num_steps", steps, steps_key)
                draft.record(epochs_key, "unsupported", f"{steps_key} sets the length")
    if draft.get("run.num_steps") is None:
        draft.translate(epochs_key, "run.num_epochs", number)
    with draft.target("checkpoint.save_every"):
        every = draft.read("trainer.save_freq", integer)
        if every is not None and every > 0:
            draft.put("checkpoint.save_every", every, "trainer.save_freq")
        draft.record("trainer.save_freq", "unsupported", "not above 0: checkpoint.save_every keeps its default")


def _trackers(draft: Draft) -> None:
    with draft.target("log.wandb_project", "log.trackers"):
        names = draft.read("trainer.logger", str) or ""
        project = draft.read("trainer.project_name", text)
        if project and "wandb" in names:
            draft.put("log.wandb_project", project, "trainer.project_name")
        trackers = [name for name in ("mlflow", "swanlab", "trackio") if name in names]
        if trackers:
            draft.put("log.trackers", trackers, "trainer.logger")
            if project:
                draft.put("log.project", project, "trainer.project_name")
        draft.record("trainer.project_name", "unsupported", "no enabled tracker has projects")
        draft.record("trainer.logger", "unsupported", "metrics.jsonl and TensorBoard always; W&B by log.wandb_project")


def _folder(draft: Draft) -> None:
    with draft.target("run.output_dir"):
        folder = draft.read("trainer.default_local_dir", text)
        if folder:
            draft.put("run.output_dir", folder, "trainer.default_local_dir")
            draft.record("trainer.experiment_name", "unsupported", "trainer.default_local_dir names the folder")
    with draft.target("run.output_dir"):
        name = draft.read("trainer.experiment_name", text)
        if name and draft.get("run.output_dir") is None:
            draft.put("run.output_dir", f"runs/{name}", "trainer.experiment_name", note="the folder of the run")
