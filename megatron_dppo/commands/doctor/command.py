"""``megatron-dppo doctor``: what is here, what of it does not go together, and a test that all parts compute right."""

from __future__ import annotations

import argparse
import getpass
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megatron_dppo.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dppo.commands.doctor.servers import Server
    from megatron_dppo.config.schema import Config

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_LOCAL = {"localhost", "127.0.0.1", "::1"}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``doctor``; all others are overrides of the configuration."""
    parser.add_argument("config", nargs="?", help="TOML configuration file: servers are held against what it needs")
    parser.add_argument("--servers", nargs="+", default=[], metavar="URL", help="inference servers to ask")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the servers' key")
    parser.add_argument("--no-self-test", action="store_true", help="start no processes")


def run_doctor(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print what was found; 0 = nothing is wrong, 1 = something is.

    Raises:
        UserError: the arguments or the configuration cannot be used (exit code 2).
    """
    from megatron_dppo.commands.doctor.combinations import known_bad
    from megatron_dppo.commands.doctor.machine import format_bytes, look
    from megatron_dppo.commands.doctor.self_test import run_self_test
    from megatron_dppo.commands.doctor.servers import ask_servers

    if overrides and options.config is None:
        raise ConfigError(f"{' '.join(overrides)}: overrides are of a configuration; put its file before them")
    config = _config(options.config, overrides)
    urls, key = _urls(options, config), _key(options, config)
    hide = _Scrubber(os.environ, urls)
    machine, wrong = look(), 0
    hide.say("## megatron-dppo doctor\n", *format_bytes(machine))
    findings = list(known_bad(machine))
    hide.say("\n## Known-bad combinations\n", *(findings if findings else ("none",)))
    wrong += sum(finding.row.stops for finding in findings)
    if urls or (config is not None and config.rollout.engine != "local"):
        from megatron_dppo.run.server_checks import required_server_features

        needs = None if config is None or config.rollout.engine == "local" else required_server_features(config, None)
        servers = ask_servers(urls, needs, key)
        hide.say("\n## Servers\n", *(line for server in servers for line in _lines(server)))
        wrong += sum(len(server.problems) for server in servers)
    if options.no_self_test:
        hide.say("\n## Self-test\n", "not run (--no-self-test)")
    else:
        hide.say("\n## Self-test (a minute or two)\n")
        test = run_self_test(len(machine.gpus))
        hide.say(f"{test.processes} processes, {test.device}, {test.seconds:.0f} s", *test.checks)
        if test.failure is not None:
            hide.say(f"FAILED: {test.failure}")
        wrong += not test.passed
    hide.say(f"\nproblems: {wrong or 'none'}")
    return 1 if wrong else 0


def _config(path: str | None, overrides: Sequence[str]) -> Config | None:
    if path is None:
        return None
    from megatron_dppo.config.io import load_config

    return load_config(path, overrides)


def _urls(options: argparse.Namespace, config: Config | None) -> list[str]:
    if options.servers or config is None or config.rollout.engine == "local":
        return list(options.servers)
    return list(config.rollout.servers.resolved_urls)


def _key(options: argparse.Namespace, config: Config | None) -> str | None:
    from megatron_dppo.engines.serving.command import api_key

    if options.api_key_env is not None or config is None:
        return api_key(options.api_key_env, os.environ, "--api-key-env")
    return api_key(config.rollout.servers.api_key_env, os.environ, "rollout.servers.api_key_env")


def _lines(server: Server) -> Iterable[str]:
    yield f"{server.url}: {server.description or 'cannot be told'}"
    yield from (f"problem  {server.url}: {problem}" for problem in server.problems)


class _Scrubber:
    """Prints text that can be shown to others: without keys, the user's name, folders and the names of hosts."""

    def __init__(self, environ: Mapping[str, str], urls: Sequence[str]) -> None:
        words = {value: "***" for name, value in environ.items() if _SECRET.search(name) and len(value) >= 6}
        try:
            parts = [urlsplit(url if "//" in url else f"//{url}") for url in urls]
        except ValueError as error:
            raise ConfigError(f"--servers {' '.join(urls)}: {error}; expected URLs as http://host:port") from error
        words |= {part.password: "***" for part in parts if part.password}
        hosts = dict.fromkeys(part.hostname for part in parts if part.hostname and part.hostname not in _LOCAL)
        words |= {host: f"host{i}" for i, host in enumerate(hosts, 1)}
        words |= {str(Path.cwd()): ".", str(Path.home()): "~"}
        words |= {user: "USER" for user in (_user(),) if len(user) >= 3 and user != "root"}
        self._words = {word: words[word] for word in sorted(words, key=len, reverse=True) if len(word) > 1}

    def say(self, *lines: object) -> None:
        """One line each."""
        for line in lines:
            text = str(line)
            for word, instead in self._words.items():
                text = text.replace(word, instead)
            print(text, flush=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
