"""A real Slurm on this machine: its nodes are hosts in network namespaces, its key, ports and folders its own."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.engines.servers import free_port
from tests.launch.hosts import Hosts

PROGRAMS = ("ip", "munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
_CONFIG = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmdPort={port_of_nodes}
SlurmdTimeout=15
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=110
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=gpu Nodes={gpu_nodes} MaxTime=INFINITE State=UP
"""
GPUS_PER_NODE = 2


class Slurm:
    """A running cluster; ``stop`` ends it.

    Args:
        folder: everything it writes; short, since it holds sockets.
        num_nodes: ``n1``, ``n2``, ..., each a host of its own (``hosts``).
        num_gpu_nodes: ``g1``, ``g2``, ... in the partition ``gpu``, whose GPUs exist for Slurm alone.

    Raises:
        RuntimeError: Slurm is not installed, this user is not root, or it does not come up.
    """

    def __init__(self, folder: Path, num_nodes: int, num_gpu_nodes: int) -> None:
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing)} not found; apt-get install slurm-wlm munge iproute2 (make test-slurm does)"
            )
        if os.geteuid() != 0:
            raise RuntimeError("a Slurm of its own needs root: slurmd starts jobs as their users")
        self.folder, self._daemons = folder, list[subprocess.Popen[bytes]]()
        self.env = dict(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf")}
        plain = [f"n{i + 1}" for i in range(num_nodes)]
        with_gpus = [f"g{i + 1}" for i in range(num_gpu_nodes)]
        names = plain + with_gpus
        self.hosts = Hosts(names, folder)
        self._configure(plain, with_gpus)
        try:
            self._start("munged", *self._munge_options())
            self._until(lambda: (folder / "munge/socket").exists(), "munged")
            self._start("slurmctld", "-D")
            for name in names:
                self._start(*self.hosts.command(name, "slurmd", "-D", "-N", name))
            self.until_idle()
        except BaseException:
            self.stop()
            raise

    def _configure(self, plain: Sequence[str], with_gpus: Sequence[str]) -> None:
        host = self.run("hostname", "-s").strip()
        (self.folder / "state").mkdir()
        (self.folder / "munge").mkdir(mode=0o700)
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ports = {"port": free_port(), "port_of_nodes": free_port()}
        nodes = {"nodes": ",".join(plain), "gpu_nodes": ",".join(with_gpus)}
        lines = [_CONFIG.format(folder=self.folder, host=host, address=self.hosts.address, **ports, **nodes)]
        for name, address in self.hosts.addresses.items():
            gpus = f" Gres=gpu:{GPUS_PER_NODE}" if name in with_gpus else ""
            lines.append(f"NodeName={name} NodeAddr={address} CPUs=2{gpus}\n")
        # Slurm wants a device file for each GPU, and takes its number from the end of the name.
        for i in range(GPUS_PER_NODE):
            os.mknod(self.folder / f"gpu{i}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        gpus = f"NodeName={nodes['gpu_nodes']} Name=gpu File={self.folder}/gpu[0-{GPUS_PER_NODE - 1}]\n"
        (self.folder / "gres.conf").write_text(gpus)
        (self.folder / "slurm.conf").write_text("".join(lines))

    def _munge_options(self) -> list[str]:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        # --force: it warns of parent folders that others can write, as /tmp.
        return ["--foreground", "--force", *(f"--{k}={self.folder}/munge/{v}" for k, v in files.items())]

    def _start(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 60
        while not ready():
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self._daemons):
                logs = "\n".join(f"{f.name}: {f.read_text()[-1500:]}" for f in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"Slurm: {what} did not come up\n{logs}")
            time.sleep(0.2)

    def until_idle(self) -> None:
        """Wait until no node works or is missing."""
        idle = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
        self._until(lambda: set(self.run(*idle, check=False).split()) == set(self.hosts.names), "its nodes")

    def run(self, *command: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(
            command, env=self.env | dict(env or {}), capture_output=True, text=True, timeout=60, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def cancel_all(self) -> None:
        """End all jobs."""
        self.run("scancel", "--user=root", check=False)
        end = time.monotonic() + 30
        while self.run("squeue", "-h", check=False).strip() and time.monotonic() < end:
            time.sleep(0.5)

    def stop(self) -> None:
        """Cancel what runs and end the daemons, the newest first."""
        self.cancel_all()
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.hosts.close()
