"""``megatron-dppo serve CONFIG``: start the inference servers of a run, or check the ones that it names."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dppo.config.rollout import RolloutConfig
    from megatron_dppo.engines.serving.nodes import ServerNode
    from megatron_dppo_engines.serving.server_process import ServerPlan

HELP = "start the inference servers of a run"
HAS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``serve``; unknown arguments are overrides of the configuration."""
    parser.add_argument("config", help="TOML configuration file")
    parser.add_argument("--urls-file", type=Path, help="write the servers' URLs here, one a line, when all are healthy")
    parser.add_argument("--log-dir", type=Path, help="folder of the servers' logs (default: run.output_dir-servers)")
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="time limit for a server to become healthy (default 1800)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="keep serving for this long after the first SIGTERM (default 0)",
    )
    parser.add_argument(
        "--skip-gpus", type=int, default=0, metavar="N", help="leave the first N visible GPUs to the trainer"
    )
    parser.add_argument("--node-rank", type=int, metavar="R", help="index of this node in a server with nnodes above 1")
    parser.add_argument(
        "--dist-init-addr", metavar="HOST:PORT", help="free port of node 0, where the nodes of such a server meet"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command lines, start nothing")
    parser.add_argument(
        "--print-mode",
        action="store_true",
        help="for scripts, print what this command does with this file: start (starts servers), colocated (starts "
        "them on the trainer's GPUs), attach (checks rollout.servers.urls) or none (rollout.engine = local)",
    )
    parser.add_argument(
        "--print-nodes", action="store_true", help="for scripts, print the number of nodes of one server"
    )
    parser.add_argument(
        "--print-rank-variables",
        action="store_true",
        help="for scripts, print the environment variables that the trainer's ranks need and that are not set here, "
        "as lines NAME=VALUE",
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start the servers and keep them running until a signal, or check the servers of ``rollout.servers.urls``."""
    from megatron_dppo.config.io import load_config
    from megatron_dppo.engines.serving.command import check_engine, plan_servers, server_options
    from megatron_dppo.files import check_model_folder
    from megatron_dppo_engines.serving.processes import visible_gpus

    # The servers depend on what the loss needs. The mode does not, so that a script can print it for any file.
    only_prints = options.print_mode or options.print_rank_variables or options.print_nodes
    config = load_config(options.config, overrides, with_functions=not only_prints)
    if config.model.transformer:  # Otherwise this command needs no torch, which takes seconds to import.
        from megatron_dppo.setup.preflight import check_flags

        check_flags(config.model, config.train)
    if only_prints:
        _print_for_scripts(options, config.rollout)
        return 0
    check_engine(config.rollout.engine)
    if config.rollout.servers.urls:
        return _attach(config.rollout, options.urls_file)
    check_model_folder(config.model.path, "model.path")
    if config.rollout.servers.model is not None:
        check_model_folder(config.rollout.servers.model, "rollout.servers.model")
    node = _server_node(options)
    visible = visible_gpus(os.environ)
    server = server_options(
        config.rollout,
        config.model,
        config.lora,
        routed_experts=config.train.needs_engine_routing,
        topk_logprobs=config.topk_logprobs,
    )
    plans = plan_servers(config.rollout, server, os.environ, visible, options.skip_gpus, node)
    network = network_variables(config.rollout, node)
    plans = [replace(plan, env=plan.env | network) for plan in plans]
    if options.dry_run:
        for plan in plans:
            gpus = plan.env.get("CUDA_VISIBLE_DEVICES")
            print(shlex.join(plan.argv) if gpus is None else f"CUDA_VISIBLE_DEVICES={gpus} {shlex.join(plan.argv)}")
        return 0
    from megatron_dppo.engines.serving.environment import shares_communicator
    from megatron_dppo_engines.serving.collectives import require_equal_versions

    if visible and shares_communicator(config.rollout) and config.rollout.engine != "local":
        versions = require_equal_versions(config.rollout.engine, config.rollout.servers.command, sys.executable)
        if versions is not None:
            _log(f"the servers' environment has {versions}, as the trainer's")
    # Only the first node of a server answers requests.
    urls = config.rollout.servers.resolved_urls if node is None or node.rank == 0 else []
    _keep_running(plans, options, options.log_dir or Path(config.run.output_dir.rstrip("/") + "-servers"), urls)
    return 0


def _keep_running(plans: list[ServerPlan], options: argparse.Namespace, log_dir: Path, urls: Sequence[str]) -> None:
    """Start the servers, write the URLs when all are healthy, and stop the servers at a signal."""
    from megatron_dppo.process.orphans import no_orphans
    from megatron_dppo_engines.serving.processes import ServerGroup, StopRequest

    if options.urls_file is not None:
        options.urls_file.unlink(missing_ok=True)
    group = ServerGroup(plans, log_dir, options.start_timeout, _log)
    with no_orphans(), StopRequest(options.grace) as stop, group:
        if group.wait_healthy(stop):
            _write_urls(options.urls_file, urls)
            group.watch(stop)
        _log("stopping the servers")


def _print_for_scripts(options: argparse.Namespace, rollout: RolloutConfig) -> None:
    """Print what a script asks for, instead of starting servers."""
    from megatron_dppo.engines.serving.command import check_engine
    from megatron_dppo.engines.serving.environment import rank_variables
    from megatron_dppo.engines.serving.nodes import count_nodes

    if options.print_mode:
        print(_mode(rollout))
    elif options.print_rank_variables:
        for name, value in rank_variables(rollout, os.environ).items():
            print(f"{name}={value}")
    else:
        check_engine(rollout.engine)
        print(count_nodes(rollout.engine, getattr(rollout, rollout.engine)))


def _server_node(options: argparse.Namespace) -> ServerNode | None:
    from megatron_dppo.engines.serving.nodes import ServerNode
    from megatron_dppo.errors import ConfigError

    if (options.node_rank is None) != (options.dist_init_addr is None):
        raise ConfigError("--node-rank and --dist-init-addr belong together. Fix: pass both, or none")
    if options.node_rank is None:
        return None
    return ServerNode(rank=options.node_rank, address=options.dist_init_addr)


def network_variables(rollout: RolloutConfig, node: ServerNode | None) -> dict[str, str]:
    """Return the variables that name the interface of ``rollout.servers.host``, and this node in a vLLM server."""
    from megatron_dppo.engines.serving.environment import shares_communicator
    from megatron_dppo.parallel.network import find_interface, interface_variables, is_loopback, source_address

    source = source_address(rollout.servers.host)
    if source is None or is_loopback(source):
        return {}
    variables = {}
    if node is not None and rollout.engine == "vllm" and "VLLM_HOST_IP" not in os.environ:
        # vLLM would take the address of the route to the internet.
        variables["VLLM_HOST_IP"] = source
    if shares_communicator(rollout):
        variables |= interface_variables(find_interface(source), os.environ)
    return variables


def _attach(rollout: RolloutConfig, urls_file: Path | None) -> int:
    from megatron_dppo.engines.serving.command import read_api_key
    from megatron_dppo_engines.serving.checks import describe_server

    servers = rollout.servers
    key = read_api_key(servers.api_key_env, os.environ, "rollout.servers.api_key_env")
    admin = read_api_key(servers.admin_api_key_env, os.environ, "rollout.servers.admin_api_key_env")
    for url in servers.urls:
        _log(describe_server(url, rollout.engine, admin or key))
    _write_urls(urls_file, servers.urls)
    return 0


def _mode(rollout: RolloutConfig) -> str:
    if rollout.engine == "local":
        return "none"
    if rollout.servers.urls:
        return "attach"
    return "colocated" if rollout.servers.colocated else "start"


def _write_urls(file: Path | None, urls: Sequence[str]) -> None:
    """Write the file atomically: launch scripts read it as soon as it exists."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text("".join(f"{url}\n" for url in urls))
    partial.replace(file)


def _log(text: str) -> None:
    print(f"serve: {text}", flush=True)
