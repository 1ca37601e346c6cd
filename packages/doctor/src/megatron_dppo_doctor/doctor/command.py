"""``megatron-dppo doctor``: installed versions, known-bad combinations, servers, self-test."""

from __future__ import annotations

import argparse
import getpass
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megatron_dppo.commands.extras import INSTALL, missing_modules
from megatron_dppo.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dppo.config.schema import Config
    from megatron_dppo_doctor.doctor.job_rank import JobRank
    from megatron_dppo_doctor.doctor.self_test import SelfTestReport
    from megatron_dppo_doctor.doctor.servers import ServerReport

HELP = "check versions, known-bad combinations and servers, run a self-test; paste its output into bug reports"
HAS_OVERRIDES = True

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``; unknown arguments are overrides of the configuration."""
    parser.add_argument("config", nargs="?", help="TOML configuration file; servers are checked for its run")
    parser.add_argument("--servers", nargs="+", default=[], metavar="URL", help="inference servers to inspect")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the servers' key")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="in a job of several processes: also write the report here"
    )
    parser.add_argument("--no-self-test", action="store_true", help="skip the self-test")
    parser.add_argument("--verbose", action="store_true", help="also print the checks of the self-test that pass")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print versions, known-bad combinations, servers and the self-test; as a rank of a job, what is between the ranks.

    Return 1 if there is a problem, else 0.
    """
    from megatron_dppo.config.io import load_config
    from megatron_dppo_doctor.doctor.combinations import find_bad_combinations
    from megatron_dppo_doctor.doctor.job_rank import read_job_rank
    from megatron_dppo_doctor.doctor.machine import format_machine, inspect_machine
    from megatron_dppo_doctor.doctor.self_test import run_self_test

    if overrides and options.config is None:
        raise ConfigError(f"{' '.join(overrides)}: overrides need a configuration. Fix: put its file before them")
    config = None if options.config is None else load_config(options.config, overrides)
    urls = _server_urls(options, config)
    key = _api_key(options, config)
    job = read_job_rank(os.environ)
    if job is not None:
        return _run_job_check(job, options, config, urls, key)
    if options.json is not None:
        raise ConfigError(
            "--json is for a job of several processes. Fix: start doctor by srun or torchrun, or leave it out"
        )
    redactor = Redactor(os.environ, urls)
    num_problems = 0

    machine = inspect_machine()
    redactor.print("## megatron-dppo doctor\n", *format_machine(machine))

    matches = list(find_bad_combinations(machine))
    redactor.print("\n## Known-bad combinations\n", *(map(str, matches) if matches else ["none"]))
    num_problems += sum(match.combination.is_fatal for match in matches)

    servers = _inspect_servers(config, urls, key)
    if servers is not None:
        redactor.print("\n## Servers\n", *(line for server in servers for line in _server_lines(server)))
        num_problems += sum(len(server.problems) for server in servers)

    if options.no_self_test:
        redactor.print("\n## Self-test\n", "skipped (--no-self-test)")
    elif missing := missing_modules():
        names = ", ".join(missing)
        redactor.print("\n## Self-test\n", f"not run: training needs the extra [train]; not installed: {names}")
        redactor.print(f"fix: {INSTALL}")
        num_problems += 1
    else:
        redactor.print("\n## Self-test (a minute or two)\n")
        self_test = run_self_test(len(machine.gpus))
        redactor.print(*_self_test_lines(self_test, verbose=options.verbose))
        num_problems += not self_test.passed
    redactor.print(f"\nproblems: {num_problems or 'none'}")
    return 1 if num_problems else 0


def _run_job_check(
    job: JobRank, options: argparse.Namespace, config: Config | None, urls: list[str], key: str | None
) -> int:
    from megatron_dppo_doctor.doctor.job import run_job_check
    from megatron_dppo_doctor.doctor.rank_facts import Finding

    def inspect() -> list[str | Finding]:
        results: list[str | Finding] = []
        for server in _inspect_servers(config, urls, key) or []:
            results.append(f"{server.url}: {server.description or 'not identified'}")
            for problem in server.problems:
                results.append(Finding(f"{server.url}: {problem}", "as the text says; docs/engines.md has the flags"))
        return results

    folder = Path.cwd() if config is None else Path(config.run.output_dir)
    return run_job_check(job, folder, inspect, options.json)


def _inspect_servers(config: Config | None, urls: list[str], key: str | None) -> list[ServerReport] | None:
    """Return a report for each server. None if there are none to ask."""
    from megatron_dppo_doctor.doctor.servers import inspect_servers

    uses_servers = config is not None and config.rollout.engine != "local"
    if not urls and not uses_servers:
        return None
    from megatron_dppo.setup.server_checks import required_server_features

    needs = required_server_features(config, None) if config is not None and uses_servers else None
    return inspect_servers(urls, needs, key)


def _self_test_lines(self_test: SelfTestReport, *, verbose: bool) -> Iterable[str]:
    checks = self_test.checks
    failed = [check for check in checks if not check.passed]
    yield f"{self_test.processes} processes, {self_test.device}, {self_test.seconds:.0f} s"
    # Measurements without a bound, such as a bandwidth, are always printed.
    yield from (str(check) for check in checks if verbose or not check.passed or check.bound is None)
    passed = f"{len(checks) - len(failed)} of {len(checks)} checks passed"
    yield passed if verbose else f"{passed} (--verbose lists them)"
    if self_test.failure is not None:
        yield f"FAILED: {self_test.failure}"


def _server_urls(options: argparse.Namespace, config: Config | None) -> list[str]:
    if options.servers or config is None or config.rollout.engine == "local":
        return list(options.servers)
    return list(config.rollout.servers.resolved_urls)


def _api_key(options: argparse.Namespace, config: Config | None) -> str | None:
    from megatron_dppo.engines.serving.command import read_api_key

    if options.api_key_env is not None or config is None:
        return read_api_key(options.api_key_env, os.environ, "--api-key-env")
    return read_api_key(config.rollout.servers.api_key_env, os.environ, "rollout.servers.api_key_env")


def _server_lines(server: ServerReport) -> Iterable[str]:
    yield f"{server.url}: {server.description or 'not identified'}"
    yield from (f"problem  {server.url}: {problem}" for problem in server.problems)


class Redactor:
    """Printer of text that may become public.

    Removes keys, the user's name, home and working folder, and host names.
    """

    def __init__(self, environ: Mapping[str, str], urls: Sequence[str]) -> None:
        # Shorter values would strike out parts of other words.
        words = {value: "***" for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= 6}
        try:
            parts = [urlsplit(url if "//" in url else f"//{url}") for url in urls]
        except ValueError as error:
            raise ConfigError(f"--servers {' '.join(urls)}: {error}; expected URLs as http://host:port") from error
        words |= {part.password: "***" for part in parts if part.password}
        hosts = dict.fromkeys(part.hostname for part in parts if part.hostname and part.hostname not in _LOOPBACK)
        words |= {host: f"host{i}" for i, host in enumerate(hosts, 1)}
        words |= {str(Path.cwd()): ".", str(Path.home()): "~"}
        # Short names, and "root", are parts of other words.
        words |= {user: "USER" for user in (user_name(),) if len(user) >= 3 and user != "root"}
        # Longest first: a folder before the user name that it contains.
        self._replacements = {word: words[word] for word in sorted(words, key=len, reverse=True) if len(word) > 1}

    def print(self, *lines: object) -> None:
        """Print each argument on a line, redacted."""
        for line in lines:
            text = str(line)
            for word, replacement in self._replacements.items():
                text = text.replace(word, replacement)
            print(text, flush=True)


def user_name() -> str:
    """Return the user's name; empty if the system does not know it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
