"""Checks before the first step, for the start of a run and for ``--dry-run``.

The checks create and change nothing. Each one reports all problems that it can find. It is skipped if it needs
something that an earlier check could not read. Data, output folder and servers are checked on rank 0 alone. All ranks
get the problems of every rank.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from torch.distributed import ProcessGroup

from megatron_dppo.config.container import CONTAINER_TOOLS
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.model import ModelConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.engines.serving.environment import expandable_segments_variable, shares_memory
from megatron_dppo.errors import ConfigError, ErrorCollector, GenerateError, MultipleErrors, UserError
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.losses.user_check import check_user_functions
from megatron_dppo.parallel.objects import all_gather_objects
from megatron_dppo.parallel.platform import Platform, count_local_processes, require_devices
from megatron_dppo.report.sinks import require_sinks
from megatron_dppo.report.steps.files import require_pyarrow
from megatron_dppo.setup.agents import load_agent_package
from megatron_dppo.setup.engines import connect_servers, open_generate_function, open_perturbation, open_scorer
from megatron_dppo.setup.inputs import Inputs, ModelInputs, read_data, read_model, resolve_num_steps, share_inputs
from megatron_dppo.setup.output_checks import output_problems, space_problems
from megatron_dppo.setup.run_folder import check_output_dir, foreign_files
from megatron_dppo.setup.server_checks import check_served_model, check_servers, find_stopped, find_sync_host_problem
from megatron_dppo.setup.teacher_setup import teacher_problems, teacher_servers
from megatron_dppo.weights.open_by_pidfd import pidfd_problem
from megatron_dppo_conversations.chat_template import prints_tools
from megatron_dppo_conversations.formats import format_note


@dataclass
class Start:
    """Input of the checks, and the data that they read for the run."""

    config: Config
    world_size: int
    rank: int = 0
    dry_run: bool = False
    """Also report problems that a run survives, such as one unusable server of several."""
    unreliable_sections: frozenset[str] = frozenset()
    """Sections of the configuration with errors, whose checks are skipped."""
    layout: Layout | None = None
    """Layout of the run, also if the model has other problems. None if it does not fit the model."""
    model: ModelInputs | None = None
    """None before it is read, or if it has problems."""
    inputs: Inputs | None = None
    """Model and data, on ranks with ``reads_data``."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user that need no fix."""

    @property
    def reads_data(self) -> bool:
        """True if this rank reads the data sets. A dry run has no process group to receive them."""
        return self.rank == 0 or self.dry_run


@dataclass(frozen=True)
class PreflightCheck:
    """One check of the start of a run."""

    name: str
    reads: frozenset[str]
    """Sections of the configuration that the check depends on."""
    find: Callable[[Start], Iterable[UserError]]
    """Returns or raises the problems."""
    on_rank_0: bool = False
    """True if only rank 0 runs the check."""


def _inputs(start: Start) -> Iterable[UserError]:
    problems = ErrorCollector()
    model = read_model(start.config, start.world_size, problems)
    start.model = model.complete
    start.layout = model.layout
    data = read_data(start.config, model, problems) if start.reads_data else None
    if model.complete is not None and data is not None:
        start.inputs = Inputs(**vars(model.complete), **vars(data))
        start.config = resolve_num_steps(start.config, start.inputs)
    return problems.errors


def _teacher(start: Start) -> Iterable[UserError]:
    return () if start.model is None else teacher_problems(start.config, start.model)


def _teacher_servers(start: Start) -> Iterable[UserError]:
    servers = teacher_servers(start.config.distillation)
    if servers is None:
        return ()
    if start.dry_run and (stopped := find_stopped(servers.urls)):
        start.notes.append(_not_running("teacher", stopped, len(servers.urls), "start them before the run"))
        return ()
    return servers.problems()


def _device(start: Start) -> Iterable[UserError]:
    require_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return ()


def _allocator(start: Start) -> Iterable[UserError]:
    """Check that servers can open the trainer's memory if it consists of expandable segments."""
    setting = expandable_segments_variable(os.environ)
    if setting is None or not shares_memory(start.config.rollout):
        return
    if Platform.detect().is_cuda and (problem := pidfd_problem()) is not None:
        yield ConfigError(
            f"{setting}: servers open such memory of the trainer by pidfd_getfd, which this system refuses between two "
            f"processes ({problem}). Fix: unset the variable for this run, or allow the call (sysctl "
            "kernel.yama.ptrace_scope=0; in a container, the capability SYS_PTRACE)"
        )


def _functions(start: Start) -> Iterable[UserError]:
    with open_generate_function(start.config):
        return ()


def _agent_format(start: Start) -> Iterable[UserError]:
    """Note in which form the agent's tool calls are read, and whether the policy sees the tools."""
    if start.config.agent.is_set and start.model is not None:
        agent, tokenizer = start.config.agent, start.model.tokenizer
        note = f"agent    responses are read by the renderer {agent.renderer!r} (agent.renderer)"
        if agent.renderer is None:
            note = format_note(tokenizer.chat_template, agent.format)
        start.notes.append(note)
        # No error: an agent may use none, or describe them in its messages.
        variables = start.config.data.chat_template_kwargs
        if tokenizer.chat_template and not prints_tools(tokenizer, datetime.now(), variables):
            start.notes.append(
                "warning  the model's chat template does not write tools into the prompt: calls with 'tools' are "
                "refused. If the agent uses any, describe them in a message, or use a model folder whose template has "
                "them"
            )
    return ()


def _agent_images(start: Start) -> Iterable[UserError]:
    """Check that the images of all data rows exist."""
    agent = start.config.agent
    if agent.isolation not in CONTAINER_TOOLS or start.inputs is None:
        return ()
    package = load_agent_package()
    images = set[str]()
    for prompts in (start.inputs.train_prompts, *start.inputs.eval_prompts.values()):
        for prompt in prompts:
            try:
                images.add(package.choose_image(agent, prompt.metadata))
            except GenerateError as error:
                raise GenerateError(f"{prompt.prompt_id}: {error}") from error
    package.check_images(agent, sorted(images))
    start.notes.append(f"agent    {agent.isolation} starts a container for each episode; images: {len(images)}")
    return ()


def _loss(start: Start) -> Iterable[UserError]:
    if not start.config.loss.has_text:
        check_user_functions(start.config.loss)
    return ()


def _reward(start: Start) -> Iterable[UserError]:
    open_scorer(start.config).close()
    return ()


def check_flags(model: ModelConfig, train: TrainConfig) -> None:
    """Check that Megatron has the flags of ``model.transformer``."""
    if model.transformer:
        from megatron_dppo.mcore.shims import apply_shims

        apply_shims(Platform.detect())
        from megatron_dppo.mcore.overrides import checked_overrides

        checked_overrides(model.transformer, router_replay=train.router_replay != "off")


def _megatron(start: Start) -> Iterable[UserError]:
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect()
    apply_shims(platform)
    from megatron_dppo.mcore import model
    from megatron_dppo.mcore.extensions import check_build_tools
    from megatron_dppo.mcore.megatron_bridge import provider_config

    config, replay = start.config, start.config.train.router_replay != "off"
    check_flags(config.model, config.train)
    if start.model is not None:
        hf_config, layout = start.model.hf_config, start.model.layout
        is_bridged = config.model.provider == "megatron-bridge"
        if is_bridged:
            megatron_config = provider_config(hf_config, config.model, layout, platform)
        else:
            megatron_config = model.transformer_config(hf_config, config.model, layout, platform, router_replay=replay)
        if not start.dry_run:
            check_build_tools(megatron_config)
        elif not platform.is_cuda and not is_bridged:
            # A run builds its model anyway. On a machine with GPUs the layers need one.
            from megatron_dppo.mcore.trial_build import check_build

            check_build(hf_config, megatron_config, layout)
        if platform.is_cuda:
            start.notes.append(model.kernel_summary(megatron_config, config.model))
        if not config.model.random_init and (note := FolderWeights(config.model.path).note()):
            start.notes.append(note)
        if num_mtp_layers := model_shape(hf_config).num_mtp_layers:
            start.notes.append(
                f"model    config.json has {num_mtp_layers} multi-token prediction layer(s) "
                "(num_nextn_predict_layers); they are neither trained nor exported"
            )
    return ()


def _perturbation(start: Start) -> Iterable[UserError]:
    perturbation = open_perturbation(start.config.rollout.perturbation)
    if perturbation is not None:
        perturbation.check()
    return ()


def _adam(start: Start) -> Iterable[UserError]:
    from megatron_dppo.mcore.transformer_engine import check_adam_support, has_transformer_engine

    config = start.config
    on_gpu = Platform.detect().is_cuda
    # On a CPU a dry run may be for a machine with GPUs.
    if not has_transformer_engine() if on_gpu else not start.dry_run:
        check_adam_support(config.optimizer)
    return ()


def _schedule(start: Start) -> Iterable[UserError]:
    """Note a learning rate that ends at 0: the last step samples and scores rollouts that change no weight."""
    optimizer, num_steps = start.config.optimizer, start.config.run.num_steps
    is_decaying = optimizer.lr_decay_style != "constant" and num_steps > optimizer.lr_warmup_steps
    if is_decaying and optimizer.min_lr == 0 and optimizer.lr > 0:
        start.notes.append(
            f"warning  the learning rate is 0 in the last of {num_steps} steps, whose rollouts change no weight: "
            f"optimizer.min_lr = 0 with lr_decay_style = {optimizer.lr_decay_style!r}. Set optimizer.min_lr above 0"
        )
    return ()


def _output(start: Start) -> Iterable[UserError]:
    problems = list(output_problems(start.config.run, start.config.rollout))
    if problems:
        return problems
    check_output_dir(start.config)
    if entries := foreign_files(start.config.run):
        shown = ", ".join(entries[:3]) + (", ..." if len(entries) > 3 else "")
        folder = start.config.run.output_dir
        start.notes.append(f"note     {folder} is no run and not empty ({shown}): the run writes beside these files")
    return ()


def _served_model(start: Start) -> Iterable[UserError]:
    check_served_model(start.config.rollout, start.config.model)
    return ()


def _space(start: Start) -> Iterable[UserError]:
    if start.inputs is None:
        return
    problems = list(space_problems(start.config, start.inputs))
    if not start.dry_run or start.world_size <= count_local_processes():
        yield from problems
        return
    # A run of more processes than this machine has devices runs elsewhere, perhaps on another file system.
    start.notes += [f"warning  {problem}" for problem in problems]


def _sinks(start: Start) -> Iterable[UserError]:
    log = start.config.log
    require_sinks(log)
    if log.rollouts_every:
        require_pyarrow(f"log.rollouts_every = {log.rollouts_every}")
    return ()


def _not_running(name: str, stopped: Sequence[str], count: int, fix: str) -> str:
    more = ", ..." if len(stopped) > 2 else ""
    return f"{name:8} {len(stopped)} of {count} not running yet ({', '.join(stopped[:2])}{more}); {fix}"


def _sync_host(start: Start) -> Iterable[UserError]:
    problem = find_sync_host_problem(start.config.rollout)
    if problem is not None and start.dry_run:
        # A dry run may be on another machine than rank 0.
        start.notes.append(f"warning  {problem}")
    elif problem is not None:
        yield ConfigError(problem)


def _servers(start: Start) -> Iterable[UserError]:
    connect_servers(start.config.rollout)  # checks the API keys and the form of the URLs
    stopped: list[str] = []
    if start.dry_run and start.config.rollout.engine != "local":
        urls = start.config.rollout.servers.resolved_urls
        stopped = find_stopped(urls)
        if stopped:
            fix = "megatron-dppo serve, or the launch script, starts them"
            start.notes.append(_not_running("servers", stopped, len(urls), fix))
    result = check_servers(start.config, start.inputs, generating=start.dry_run, skipped=stopped)
    # A run needs one usable server: the problems of the others are notes.
    if start.dry_run or not result.usable:
        return result.problems
    start.notes += [f"servers  {problem}" for problem in result.problems]
    return ()


CHECKS: Sequence[PreflightCheck] = (
    PreflightCheck("model and data", frozenset({"model", "parallel", "data", "rollout", "train"}), _inputs),
    PreflightCheck("teacher", frozenset({"distillation", "model", "parallel", "data", "rollout"}), _teacher),
    PreflightCheck("devices", frozenset(), _device),
    PreflightCheck("memory allocator", frozenset({"rollout"}), _allocator),
    PreflightCheck("generate function", frozenset({"rollout"}), _functions),
    PreflightCheck("agent format", frozenset({"model", "agent"}), _agent_format, on_rank_0=True),
    PreflightCheck("agent images", frozenset({"agent", "data", "model"}), _agent_images, on_rank_0=True),
    PreflightCheck("loss function", frozenset({"loss"}), _loss),
    PreflightCheck("reward function", frozenset({"reward", "rollout"}), _reward),
    PreflightCheck("Megatron's configuration", frozenset({"model", "parallel", "train"}), _megatron),
    # After the check that imports Megatron with its shims: modelopt imports Megatron if it is installed.
    PreflightCheck("perturbation", frozenset({"rollout"}), _perturbation),
    PreflightCheck("Adam", frozenset({"optimizer"}), _adam),
    PreflightCheck("learning rate", frozenset({"optimizer", "run", "data", "rollout"}), _schedule, on_rank_0=True),
    PreflightCheck("log", frozenset({"log"}), _sinks, on_rank_0=True),
    PreflightCheck("output folder", frozenset({"run", "checkpoint"}), _output, on_rank_0=True),
    PreflightCheck("free space", frozenset({"run", "checkpoint", "model"}), _space, on_rank_0=True),
    PreflightCheck("the servers' model", frozenset({"model", "rollout"}), _served_model, on_rank_0=True),
    PreflightCheck("address of rank 0", frozenset({"rollout"}), _sync_host, on_rank_0=True),
    PreflightCheck("servers", frozenset({"rollout", "data"}), _servers, on_rank_0=True),
    PreflightCheck("the teacher's servers", frozenset({"distillation"}), _teacher_servers, on_rank_0=True),
)
"""Order of the checks: later ones use results of earlier ones."""


def find_problems(start: Start) -> list[UserError]:
    """Run every check and return the problems, each one once."""
    problems = ErrorCollector()
    skipped = []
    for check in CHECKS:
        if check.on_rank_0 and start.rank != 0:
            continue
        if check.reads & start.unreliable_sections:
            skipped.append(check.name)
            continue
        for error in problems.attempt(lambda c=check: list(c.find(start))) or ():  # type: ignore[misc]
            problems.add(error)
    if skipped:
        start.notes.append(f"not checked, because of the errors in the configuration: {', '.join(skipped)}")
    return problems.errors


def require_inputs(start: Start, errors: Sequence[UserError], group: ProcessGroup | None = None) -> Inputs:
    """Return the inputs with the data sets of rank 0; a UserError on every rank if one has a problem."""
    texts_by_rank = all_gather_objects([str(error) for error in errors], group)
    if len(texts_by_rank) > 1:
        by_text = {str(error): error for error in errors}
        problems = ErrorCollector()
        for rank, texts in enumerate(texts_by_rank):
            for text in texts:
                # A problem that rank 0 has too counts as a problem of all ranks and names none.
                is_local = text not in texts_by_rank[0]
                named = ConfigError(f"[rank {rank}] {text}")
                problems.add(named if is_local else by_text.get(text) or ConfigError(text))
        errors = problems.errors
        for error in errors:
            error.on_every_rank = True
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise MultipleErrors(errors)
    if group is not None and len(texts_by_rank) > 1:
        assert start.model is not None
        return share_inputs(start.model, start.inputs, group)
    assert start.inputs is not None
    return start.inputs
