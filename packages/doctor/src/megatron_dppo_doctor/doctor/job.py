"""``doctor`` in a job of several processes: facts of the ranks side by side, shared files, and the network."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megatron_dppo.errors import JobError
from megatron_dppo.files import disk_errors, write_synced
from megatron_dppo.parallel.network import choose_interface
from megatron_dppo_doctor.doctor.job_rank import JobRank, set_torch_variables
from megatron_dppo_doctor.doctor.network import LIMIT_SECONDS, join_store, limited, measure_clocks, measure_network
from megatron_dppo_doctor.doctor.rank_facts import Finding, RankFacts, compare_facts, format_rows, inspect_rank
from megatron_dppo_doctor.doctor.shared_files import check_shared_folder


def run_job_check(
    job: JobRank, folder: Path, inspect_servers: Callable[[], Sequence[str | Finding]], json_file: Path | None
) -> int:
    """Check the job together with all other ranks; rank 0 prints.

    All nodes have to see ``folder``. Rank 0 calls ``inspect_servers`` and writes ``json_file``. Return the exit code: 1
    on rank 0 if there is a problem.
    """
    set_torch_variables(job)
    report = _Report(job, json_file)
    store = PrefixStore("megatron_dppo_doctor", join_store(job))
    facts = _choose_interfaces(store, job, _exchange_facts(store, job))
    hosts = [rank.host for rank in facts]
    report.facts = facts
    report.add(
        [f"{len(facts)} ranks on {len(set(hosts))} nodes: {', '.join(dict.fromkeys(hosts))}", *format_rows(facts)]
    )
    with limited("comparing the clocks", job, "run it again; a rank has ended"):
        offsets = measure_clocks(store, job, hosts)
    if job.rank == 0:
        report.add(compare_facts(facts, offsets))
    with limited("the shared folder", job, "check that all nodes mount it"):
        report.add(check_shared_folder(folder, PrefixStore("files", store), job, hosts))
    report.add(measure_network(PrefixStore("network", store), job, hosts))
    store.set(f"done/{job.rank}", "")
    if job.rank == 0:
        report.add(inspect_servers())
        # The store ends with this process, and others may still read from it.
        with suppress(OSError, RuntimeError):
            store.wait([f"done/{rank}" for rank in range(job.world_size)], timedelta(seconds=LIMIT_SECONDS))
    return report.finish()


def _exchange_facts(store: Store, job: JobRank) -> list[RankFacts]:
    store.set(f"facts/{job.rank}", json.dumps(asdict(inspect_rank(job))))
    keys = [f"facts/{rank}" for rank in range(job.world_size)]
    try:
        store.wait(keys, timedelta(seconds=LIMIT_SECONDS))
    except (OSError, RuntimeError) as error:
        if job.rank:
            raise JobError(f"rank {job.rank}: not all ranks reported; the output of rank 0 names them") from error
        reported = {key for key in keys if store.check([key])}
        hosts = sorted({json.loads(store.get(key))["host"] for key in reported})
        missing = [str(rank) for rank, key in enumerate(keys) if key not in reported]
        raise JobError(
            f"{len(missing)} of {job.world_size} ranks did not report within {LIMIT_SECONDS:.0f} s: "
            f"{', '.join(missing[:16])}{', ...' if len(missing) > 16 else ''}. Nodes that reported: "
            f"{', '.join(hosts)}. Fix: look at the output of the others' nodes; they may not reach "
            f"{job.address}:{job.port}, or have another Python"
        ) from error
    return [RankFacts(**json.loads(store.get(key))) for key in keys]


def _choose_interfaces(store: Store, job: JobRank, facts: list[RankFacts]) -> list[RankFacts]:
    """Choose the interface of this rank's groups, as a run does, and return the facts with those of all ranks."""
    chosen = choose_interface(PrefixStore("interfaces", store), job.rank, job.world_size)
    store.set(f"interface/{job.rank}", os.environ.get("GLOO_SOCKET_IFNAME", chosen or ""))
    return [replace(rank, interface=store.get(f"interface/{rank.rank}").decode()) for rank in facts]


class _Report:
    """Lines as they come, and the findings among them."""

    def __init__(self, job: JobRank, json_file: Path | None) -> None:
        self.facts: list[RankFacts] = []
        self._job = job
        self._json_file = json_file
        self._lines: list[str] = []
        self._findings: list[Finding] = []
        if job.rank == 0:
            print(f"## megatron-dppo doctor: {job.world_size} ranks, store at {job.address}:{job.port}\n", flush=True)

    def add(self, results: Sequence[str | Finding] | Iterator[str | Finding]) -> None:
        """Take the results one by one; rank 0 prints each at once, since the next may hang."""
        for result in results:
            if self._job.rank:
                continue
            if isinstance(result, Finding):
                self._findings.append(result)
            else:
                self._lines.append(result)
            print(result, flush=True)

    def finish(self) -> int:
        """Print the verdict, write the file, and return the exit code."""
        if self._job.rank:
            return 0
        num_problems = sum(finding.is_fatal for finding in self._findings)
        print(f"\nproblems: {num_problems or 'none'}", flush=True)
        if self._json_file is not None:
            content = {
                "ranks": [asdict(rank) for rank in self.facts],
                "lines": self._lines,
                "findings": [asdict(finding) for finding in self._findings],
            }
            with disk_errors(self._json_file, "the report"):
                write_synced(self._json_file, json.dumps(content, indent=2) + "\n")
        return 1 if num_problems else 0
