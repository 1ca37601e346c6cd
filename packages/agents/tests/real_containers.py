"""Real podman and docker, and an image that needs no registry."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

IMAGE = "localhost/megatron-dppo-test:python"
_LEFT_OUT = re.compile(r"/(test|tests|site-packages|idlelib|config-3[^/]*|__pycache__|ensurepip|lib2to3|tkinter)(/|$)")
# Some machines allow a process only less than the tools ask for.
_PODMAN_SETTINGS = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
"""


def write_image(file: Path) -> None:
    """Write this Python with its standard library and the libraries that it loads, as files of an image."""
    program = Path(os.path.realpath(sys.executable))
    library = Path(os.__file__).parent
    binaries = [program, *(library / "lib-dynload").glob("*.so"), *program.parents[1].glob("lib/libpython3*.so*")]
    loaded = set[str]()
    for binary in binaries:
        listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
        loaded.update(re.findall(r"(/\S+) \(0x", listed))
    with tarfile.open(file, "w") as image:
        image.add(program, arcname=str(program)[1:])
        image.add(library, arcname=str(library)[1:], filter=lambda each: None if _LEFT_OUT.search(each.name) else each)
        for name in loaded:
            image.add(os.path.realpath(name), arcname=name[1:])
        link = tarfile.TarInfo("bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, str(program)
        image.addfile(link)
        for name in ("tmp", "proc", "sys", "dev", "etc", "run"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            image.addfile(folder)


class RealTool:
    """A container tool that works on this machine, with the image ``IMAGE``.

    Raises:
        pytest.skip.Exception: It does not.
    """

    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self._daemon: subprocess.Popen[bytes] | None = None
        if shutil.which(name) is None or os.getuid():
            pytest.skip(f"needs {name}, and root: tools/install_containers.sh")
        (folder / "containers.conf").write_text(_PODMAN_SETTINGS)
        monkeypatch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        if name == "docker":
            self._start_daemon(folder, monkeypatch)
        if subprocess.run([name, "image", "inspect", IMAGE], capture_output=True, check=False).returncode:
            write_image(folder / "image.tar")
            self.run("import", str(folder / "image.tar"), IMAGE)
        try:
            self.run("run", "--rm", "--network=none", IMAGE, "python3", "-c", "pass")
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"{name} cannot start a container here: {error.stderr}")

    def _start_daemon(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start a daemon of this test's alone, without networks of its own."""
        if shutil.which("dockerd") is None:
            pytest.skip("needs dockerd: tools/install_containers.sh")
        address = f"unix://{folder}/docker.sock"
        monkeypatch.setenv("DOCKER_HOST", address)
        options = ["--bridge=none", "--iptables=false", "--ip6tables=false", f"--data-root={folder}/data"]
        options += [f"--exec-root={folder}/exec", f"--pidfile={folder}/pid", f"--host={address}"]
        with open(folder / "dockerd.log", "wb") as log:
            self._daemon = subprocess.Popen(["dockerd", *options], stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
            if time.monotonic() > deadline or self._daemon.poll() is not None:
                self.close()
                pytest.skip(f"no docker daemon: {(folder / 'dockerd.log').read_text()[-300:]}")
            time.sleep(0.2)

    def run(self, *arguments: str) -> str:
        """Return the output of a command of the tool."""
        done = subprocess.run([self.name, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def containers(self) -> list[str]:
        """Return the ids of all containers of runs, also of those that have ended."""
        return self.run("ps", "--all", "--quiet", "--filter", "label=megatron-dppo.run").split()

    def close(self) -> None:
        """End the daemon."""
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait(30)
