"""``code``: formats of tests, right and wrong programs, and programs that attack what judges them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest

from megatron_dppo.config.reward_options import CodeOptions
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import FunctionSpec, RewardItem, RewardScorer, code
from megatron_dppo.rewards.code import Code, last_block
from megatron_dppo.setup.engines import open_scorer
from megatron_dppo_agents.launcher import landlock_version
from megatron_dppo_answers.code_tests import read_tests, same_output, same_value
from megatron_dppo_answers.sandbox import Limits, ProgramExit, RunningProgram, Sandbox, interpreter, probe
from megatron_dppo_answers.sandboxed import harness
from megatron_dppo_answers.sandboxed.harness import decode, encode, solution_names
from tests.unit.configs import config


@pytest.fixture(scope="module")
def share() -> Code:
    return Code(CodeOptions(score="share", seconds=5.0, total_seconds=60.0), "reward")


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    python, visible = interpreter("")
    return Sandbox(python, visible, namespaces=True, network=False, limits=Limits(seconds=10.0, memory_mb=512))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # one that has ended is not left
            started_here = "launcher.py" in str(process.cmdline()) and process.ppid() == os.getpid()
            if started_here or (process.username() == "nobody" and "main.py" in process.cmdline()):
                left.append(process)
    assert not left


def item(source: str, tests: Any, **metadata: Any) -> RewardItem:
    text = f"so\n```python\n{textwrap.dedent(source)}\n```\n"
    label = tests if isinstance(tests, str) else json.dumps(tests)
    return RewardItem(prompt="", completion=text, label=label, metadata=metadata)


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print('done')
"""

BLOCKS = [
    ("```python\na\n```\nor\n```py\nb\n```", "b\n"),
    ("```\nx = '```'\n```", "x = '```'\n"),
    ("<think>```python\na\n```</think> none", None),
    ("```python\na\n```\n```bash\nls\n```", "a\n"),
    ("```python\na\n```\n```python\nnever closed", "a\n"),
    ("```python\nnever closed", None),
    ("  ```python title=x\n  a\n  ```", "  a\n"),
    ("print(1)", None),
]


@pytest.mark.parametrize(("text", "block"), BLOCKS)
def test_the_program_is_the_last_closed_block_of_python(text: str, block: str | None) -> None:
    assert last_block(text) == block


DOUBLE = "n = int(input())\nprint(n * 2)"
ADD = "from __future__ import annotations\ndef add(a: List[int], b):\n    print('noise')\n    return (a[0] + b,)"
METHOD = "class Solution:\n    def add(self, a, b):\n        return [a[0] + b]"
ROOT = "def poly(c, x):\n    return c[0] + c[1] * x\ndef root(c):\n    return -c[0] / c[1]"
CHECK = """def check(candidate):
    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-9
    assert candidate([2, 2]) == -1
"""
USE = "def check(candidate):\n    assert candidate(a=[1], b=2) == [3]"
GOOD: list[tuple[str, Any, dict[str, Any], float]] = [
    (DOUBLE, {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "5"]}, {}, 0.5),
    (DOUBLE, {"inputs": [["1"], ["3", "x"]], "outputs": [["2"], ["6"]]}, {}, 1.0),
    (DOUBLE, [{"input": "4", "output": "8", "testtype": "stdin"}], {}, 1.0),
    (ADD, {"inputs": [[[1], 2], [[3], 4]], "outputs": [[3], [8]], "fn_name": "add"}, {}, 0.5),
    (METHOD, {"inputs": ["[1]\n2"], "outputs": ["[3]"], "fn_name": "add"}, {}, 1.0),
    (METHOD, [{"input": "[1]\n2", "output": "[3]"}], {"metadata": {"func_name": "add"}}, 1.0),
    (ROOT, CHECK, {"entry_point": "root"}, 1.0),
    (ROOT.replace("return -", "return "), CHECK, {"entry_point": "root"}, 0.0),
    (METHOD, {"test": USE, "entry_point": "Solution().add"}, {}, 1.0),
    (
        "def f(x):\n    return {x, (x, x)}",
        ["assert f(y) == {1, (1, 1)}", "assert f(1) == 1"],
        {"test_setup_code": "import math\ny = 1"},
        0.5,
    ),
    ("def f(x):\n    raise ValueError(x)", "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass", {}, 1.0),
    ("syntax error", {"inputs": [""], "outputs": [""]}, {}, 0.0),
    ("import sys\nprint(2)\nsys.exit(3)", {"inputs": ["1"], "outputs": ["2"]}, {}, 0.0),
    ("exit()", {"inputs": [""], "outputs": [""]}, {}, 1.0),
]


def test_right_and_wrong_programs_in_every_format_of_tests(share: Code) -> None:
    for source, tests, metadata, expected in GOOD:
        actual = share(item(source, tests, **metadata))
        assert actual == {"score": expected, "passed": expected}, (source, tests, actual)


def test_all_or_nothing_stops_at_the_first_failure_and_the_time_budget_ends_slow_programs() -> None:
    every = Code(CodeOptions(seconds=0.5, total_seconds=1.2), "reward")
    tests = {"inputs": ["1"] * 9, "outputs": ["3"] * 9}
    started = time.monotonic()
    assert every(item(DOUBLE, tests)) == {"score": 0.0, "passed": 0.0}
    assert every(RewardItem(prompt="", completion="no code", label=json.dumps(tests))) == {"score": 0.0, "passed": 0.0}
    shares = Code(CodeOptions(score="share", seconds=0.5, total_seconds=1.2), "reward")
    assert shares(item("while True: pass", tests))["score"] == 0.0
    assert time.monotonic() - started < 8, "nine tests of 0.5 s, but for the budget"


def test_a_program_that_hangs_is_wrong_and_a_row_without_tests_fails() -> None:
    scorer = RewardScorer(FunctionSpec("code", options={"seconds": 0.7, "tests_key": "extra.tests"}), 30.0, 1)
    tests = {"inputs": ["1"], "outputs": ["2"]}
    rows = [item(source, "", extra={"tests": json.dumps(tests)}) for source in ("import time; time.sleep(9)", DOUBLE)]
    hangs, right, bare, odd = scorer.score([*rows, item(DOUBLE, ""), item(DOUBLE, "", extra={"tests": {"x": 1}})])
    scorer.close()
    assert [(r.reward, r.failed) for r in (hangs, right)] == [(0.0, False), (1.0, False)]
    assert right.parts == {"score": 1.0, "passed": 1.0}
    assert bare.failed and "no column 'extra.tests'" in bare.error
    assert odd.failed and "expected tests as" in odd.error


@pytest.mark.parametrize("network", ["none", "allowed"])
def test_a_sample_over_the_scorers_limit_is_killed_with_its_program(network: str) -> None:
    options = {"seconds": 60.0, "total_seconds": 60.0, "network": network}
    scorer = RewardScorer(FunctionSpec("code", options=options), 3.0, 1)
    result = scorer.score([item(DAEMON + "time.sleep(600)", {"inputs": ["1"], "outputs": ["2"]})])[0]
    assert result.failed and "took longer than" in result.error
    scorer.close()


SAME = [
    ("1\n2", "1 \n2\n\n"),
    ("  1", "1"),
    ("a 1e-9", "a 0.0"),
    ("", "\n"),
    ("3.0", "3"),
    ("3", "3.0"),
    ("+3", "3"),
    ("0.3333333", "0.33333334"),
    ("3.14159", "3.141592653"),
    ("1e3", "1000"),
    ("-0", "0"),
    ("0.50", ".5"),
    ("1E-7", "0.0000001"),
    ("9" * 9000, "9" * 9000 + ".0"),
    ("1 2.0 3", "1.0 2 3"),
    ("nan", "nan"),
    ("00.5", "0.5"),
    ("1e400", "1.0e400"),
]
OTHER = [
    ("1\n\n2", "1\n2"),
    ("4.0", "3"),
    ("2 1", "1 2"),
    ("nan", "1.0"),
    ("1", "1\n2"),
    ("0.34", "0.33"),
    ("3", "03"),
    ("03", "3"),
    ("9" * 9000, "9" * 8999 + "8"),
    ("50000000000000001", "50000000000000000"),
    ("50000000000000001.0", "50000000000000000"),
    ("3.0000001", "3"),
    ("1e-7", "2e-7 "[:4] + "0"),
    ("inf", "1.0"),
    ("1e999999999", "1.0"),
    ("0x10", "16"),
    ("1_000", "1000"),
    ("three", "3"),
    ("12:03", "12:3"),
    ("1.00002", "1.0"),
]
BIG = 10**5000


def test_outputs_are_compared_by_lines_and_numbers_by_value() -> None:
    """By hand, after the harnesses of LiveCodeBench (Decimal) and of APPS and TACO (numpy.allclose)."""
    assert [pair for pair in SAME if not same_output(*pair)] == []
    assert [pair for pair in OTHER if same_output(*pair)] == []
    equal = [((1, [2]), [1, [2]]), (3, [3]), (0.1 + 0.2, 0.3), ({1: "a"}, {"1": "a"}), (float("inf"), float("inf"))]
    equal += [
        (3.0, 3),
        (3, 3.0),
        ([1.000001, (2,)], [1.0, [2.0]]),
        (BIG, BIG),
        ([BIG], [BIG]),
        ({"a": 0.3000001}, {"a": 0.3}),
    ]
    unequal: list[tuple[Any, Any]] = [
        (True, 1),
        ("1", 1),
        ([1], [1, 2]),
        (None, 0),
        (3, [3, 4]),
        ({1}, [1]),
        (BIG, BIG + 1),
    ]
    unequal += [(BIG, 1.0), (1.5, BIG), (float("nan"), 1.0), (2**60, 2**60 + 1), ([1.0001], [1.0]), (float("inf"), 1.0)]
    assert [pair for pair in equal if not same_value(*pair)] == []
    assert [pair for pair in unequal if same_value(*pair)] == []


def test_floats_have_the_tolerance_of_numpy() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        wanted = generator.uniform(-9, 9) * 10 ** generator.randint(-9, 9)
        actual = wanted * (1 + generator.uniform(-2e-5, 2e-5)) + generator.uniform(-2e-8, 2e-8)
        expected = bool(numpy.isclose(actual, wanted))
        assert same_value(actual, wanted) is expected
        assert same_output(f"{actual!r}", f"{wanted!r}") is expected


def test_integers_of_any_length_pass_through_programs_and_functions(share: Code) -> None:
    power = "1" + "0" * 9000
    stdio = {"inputs": ["9000", "9000"], "outputs": [power, power[:-1] + "1"]}
    limit = sys.get_int_max_str_digits()
    assert share(item("print(10 ** int(input()))", stdio))["passed"] == 0.5
    assert sys.get_int_max_str_digits() == limit, "other readers of this process keep their limit"
    function = f'{{"inputs": [[{power}], [{power}]], "outputs": [{power}0, {power}], "fn_name": "f"}}'
    assert share(item("def f(n):\n    return n * 10", function))["passed"] == 0.5


def test_only_plain_data_crosses_the_sandbox_and_keeps_its_types() -> None:
    value = [1, 2.5, None, True, "x", (1, {2}), {"a": b"c", (1, 2): frozenset({3})}, 1j, float("inf")]
    assert decode(json.loads(json.dumps(encode(value)))) == value
    for bad in (object(), [lambda: 0], int):
        with pytest.raises(TypeError, match="use plain data"):
            encode(bad)
    for bad in ({"eval": "1"}, {"list": [1], "x": 1}, [1]):
        with pytest.raises(ValueError, match="encoded value"):
            decode(bad)
    tests = "import math as m\nfor i in range(3):\n    assert f(i) == m.floor(g(i)) + len([j for j in (i,)])"
    assert solution_names(tests) == {"f", "g"}
    with pytest.raises(ValueError, match="2 inputs and 1 outputs"):
        read_tests({"inputs": ["1", "2"], "outputs": ["1"]}, {})


FORGED = [
    "import os\nos._exit(77)",
    "import os\nprint('passed')\nos.write(1, b'passed')\ndef f(x):\n    os._exit(77)",
    "class Any_:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return Any_()",
    "class N(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\ndef f(x):\n    return N(0)",
    "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.len = lambda x: 0\ndef f(x):\n    return 0",
    "def check(c):\n    pass\ndef len(x):\n    return 0\ncandidate = None\ndef f(x):\n    return 0",
    "import sys, json\ndef f(x):\n    sys.exit(0)",
    "import sys, os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'{\"value\": 4}\\n' * 9)\n"
    "    except OSError:\n        pass\ndef f(x):\n    return 0",
    "import gc, sys\ndef f(x):\n    frames = [g for g in gc.get_objects() if 'tests.py' in str(g)[:100]]\n"
    "    return open('tests.py').read()",
    "import os, signal\ndef f(x):\n    os.kill(-1, signal.SIGKILL)\n    return 0",
    "import os, signal\ndef f(x):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 0",
]


@pytest.mark.slow
def test_a_verdict_cannot_be_forged_from_inside(share: Code) -> None:
    """Every program is wrong, and each attacks the one that judges it."""
    asserts = (
        "def check(candidate):\n    assert candidate(2) == 4\n    assert len([candidate(3)]) == 1 and candidate(3) == 9"
    )
    call = {"inputs": [[2]], "outputs": [4], "fn_name": "f"}
    lines = {"inputs": ["2"], "outputs": ["4"]}
    for source in FORGED:
        assert share(item(source, asserts, entry_point="f"))["score"] == 0.0, source
    for source in FORGED[::3]:
        assert share(item(source, call))["score"] == 0.0, source
    assert share(item(FORGED[0], lines))["score"] == 0.0
    assert share(item("def f(x):\n    return x * x", asserts, entry_point="f"))["score"] == 1.0


IS_OPEN = """
def isopen(f):
    try:
        return bool(os.fstat(f))
    except OSError:
        return False
"""


def ended(sandbox: Sandbox, source: str, stdin: str = "") -> ProgramExit:
    return RunningProgram(sandbox, {"main.py": textwrap.dedent(source)}, stdin=stdin).finish()


def test_a_program_sees_nothing_of_the_machine(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "sk-123")
    (tmp_path / "answers").write_text("sk-123")
    source = f"""
        import os
        print(sorted(os.environ), os.path.exists({str(tmp_path)!r}), os.path.exists({str(Path(__file__))!r}))
        print(os.path.exists("/etc/passwd"), os.path.exists("/proc/self"), sorted(os.listdir(".")))
        print(os.getuid() != 0, os.getpid() < 9, sorted(os.listdir("/dev")), [f for f in range(99) if isopen(f)])
    """
    result = RunningProgram(sandbox, {"main.py": IS_OPEN + textwrap.dedent(source)}).finish()
    assert result.code == 0 and "sk-123" not in result.output
    assert result.output.splitlines() == [
        "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'TMPDIR'] False False",
        "False False ['main.py', 'stdin']",
        "True True ['null', 'urandom'] [0, 1, 2]",
    ]


def test_a_program_reaches_no_network_and_writes_nowhere_else(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        name = f"\0sandbox-test-{os.getpid()}"
        local.bind(name)
        local.listen()
        source = f"""
            import ctypes, os, socket
            def attempt(what):
                try:
                    what()
                    print("reached")
                except OSError as error:
                    print(type(error).__name__)
            attempt(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2))
            attempt(lambda: socket.socket(socket.AF_UNIX).connect({name!r}))
            attempt(lambda: socket.create_connection(("192.0.2.1", 80), 2))
            for place in ("/x", "/usr/x", "/dev/x", os.path.dirname(os.__file__) + "/x"):
                attempt(lambda: open(place, "w"))
            libc = ctypes.CDLL(None, use_errno=True)
            print(libc.unshare(0x10000000), libc.mount(b"none", b"/box", b"tmpfs", 0, None), libc.setuid(0))
            def fill():
                for i in range(9):
                    open(f"/tmp/{{i}}", "wb").write(bytes(30 << 20))
            attempt(fill)
        """
        lines = ended(sandbox, source).output.splitlines()
    assert "reached" not in lines and len(lines) == 9
    assert lines[7] == "-1 -1 -1"


SYSTEM_PYTHON = "/usr/bin/python3"
LOCAL_ATTACKS = """
import ctypes, errno, socket
PORT, PORT6, CLOSED, NAME = {ports}
def attempt(what):
    try:
        print(what() or "reached")
    except OSError as error:
        print(errno.errorcode.get(error.errno, error))
def connect(family, address, protocol=0):
    socket.socket(family, socket.SOCK_STREAM, protocol).connect(address)
V4, V6, FAST_OPEN = socket.AF_INET, socket.AF_INET6, 0x20000000
attempt(lambda: connect(V4, ("127.0.0.1", PORT)))
attempt(lambda: connect(V4, ("127.8.9.1", PORT)))
attempt(lambda: connect(V6, ("::1", PORT6)))
attempt(lambda: connect(V6, ("::ffff:127.0.0.1", PORT)))
attempt(lambda: connect(V4, ("127.0.0.1", PORT), 262))
attempt(lambda: connect(V6, ("::1", PORT6), 262))
attempt(lambda: connect(V4, ("127.0.0.1", PORT), 256))
attempt(lambda: connect(43, ("127.0.0.1", PORT)))
attempt(lambda: socket.socket().sendto(b"x", FAST_OPEN, ("127.0.0.1", PORT)))
attempt(lambda: socket.socket().sendmsg([b"x"], [], FAST_OPEN, ("127.0.0.1", PORT)))
attempt(lambda: connect(socket.AF_UNIX, NAME))
libc = ctypes.CDLL(None, use_errno=True)
def io_uring():
    if libc.syscall(425, 1, ctypes.create_string_buffer(120)) < 0:
        raise OSError(ctypes.get_errno(), "")
attempt(io_uring)
print("allowed")
attempt(lambda: connect(V4, ("127.0.0.1", CLOSED)))
with socket.create_server(("127.0.0.1", 0)) as own:
    attempt(lambda: connect(V4, own.getsockname()))
def datagram():
    receiver, sender = socket.socket(V4, socket.SOCK_DGRAM), socket.socket(V4, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    sender.sendto(b"x", receiver.getsockname())
    return receiver.recv(9).decode()
attempt(datagram)
attempt(lambda: socket.getaddrinfo("127.0.0.1", 80)[0][4][0])
attempt(lambda: socket.socketpair() and "pair")
"""


@pytest.mark.skipif(landlock_version() < 4, reason="needs Landlock with rules for ports (Linux 6.7)")
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_program_with_the_network_does_not_reach_the_services_of_this_machine(namespaces: bool) -> None:
    python, visible = interpreter("" if namespaces else SYSTEM_PYTHON)
    limits = Limits(seconds=20.0, memory_mb=512)
    allowed = Sandbox(python, visible, namespaces=namespaces, network=True, limits=limits)
    with (
        socket.create_server(("0.0.0.0", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as server6,
        socket.socket() as closed,
        socket.socket(socket.AF_UNIX) as local,
    ):
        closed.bind(("127.0.0.1", 0))
        name = f"\0sandbox-test-{os.getpid()}"
        local.bind(name)
        local.listen()
        ports = (server.getsockname()[1], server6.getsockname()[1], closed.getsockname()[1], name)
        lines = ended(allowed, LOCAL_ATTACKS.format(ports=ports)).output.splitlines()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    *attacks, end = lines[:13]
    assert end == "allowed" and set(attacks) <= {"EACCES", "EPERM"}, lines
    assert lines[13:] == ["ECONNREFUSED", "reached", "x", "127.0.0.1", "pair"], lines


HOGS = {
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
    "memory": "x = bytearray(3 << 30)\nprint('had it')",
    "list": "x = []\nwhile True:\n    x.append(' ' * (1 << 20))",
    "output": "while True:\n    print('x' * 9999)",
    "files": "f = [open('/dev/null') for i in range(999)]\nprint('had them')",
    "sleep": "import time\ntime.sleep(99)",
    "spin": "while True: pass",
    "ignores signals": "import signal\nfor n in range(1, 32):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
    "    except OSError:\n        pass\nwhile True: pass",
}


@pytest.mark.slow
def test_programs_that_exhaust_resources_are_killed_with_all_their_children(sandbox: Sandbox) -> None:
    short = replace(sandbox, limits=replace(sandbox.limits, seconds=1.5, memory_mb=256, output_kb=64))
    for name, source in HOGS.items():
        started = time.monotonic()
        result = ended(short, source)
        assert result.code != 0 and "had" not in result.output and len(result.output) <= 64 << 10, (name, result)
        assert time.monotonic() - started < 8, name
    assert ended(short, DAEMON) == ProgramExit(0, "done\n"), "what it leaves holds its output open"


def test_concurrent_runs_do_not_share_their_process_limit(sandbox: Sandbox) -> None:
    """The kernel counts processes by user, and all programs are the same nobody."""
    few = replace(sandbox, limits=replace(sandbox.limits, processes=3))
    assert ended(few, COUNT) == ProgramExit(0, "2\n"), "three with itself"
    source = "import subprocess, time\nprint(subprocess.run(['/bin/sleep', '0.5']).returncode)"
    results: list[ProgramExit] = []
    threads = [threading.Thread(target=lambda: results.append(ended(few, source))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [ProgramExit(0, "0\n")] * 6


COUNT = """
import os, time
children = []
try:
    while pid := os.fork():
        children.append(pid)
    time.sleep(60)
except OSError:
    print(len(children))
"""


@pytest.mark.skipif(not os.path.exists(SYSTEM_PYTHON), reason="needs an interpreter that any user can run")
def test_without_namespaces_programs_have_limits_and_leave_nothing(tmp_path: Path) -> None:
    python, visible = interpreter(SYSTEM_PYTHON)
    bare = Sandbox(python, visible, namespaces=False, network=True, limits=Limits(seconds=1.5, memory_mb=256))
    assert probe(bare) == ""
    assert ended(bare, DAEMON) == ProgramExit(0, "done\n")
    for name in ("memory", "list", "output", "sleep"):
        assert ended(bare, HOGS[name]).code != 0, name
    if os.getuid() == 0:
        assert ended(bare, "import os\nprint(os.getuid())").output == "65534\n"


NOT_ROOT = "1 ['stdin', 'main.py'] False"
AS_ANOTHER_USER = """
import codecs, os, sys
from megatron_dppo_answers import sandbox as module
codecs.lookup("latin-1")  # what this process needs of its own Python later, which the other user cannot read
os.setgroups([])
os.setresgid(1234, 1234, 1234)
os.setresuid(1234, 1234, 1234)
module._LAUNCHER = sys.argv[1]
sys.executable = sys.argv[2]
python, visible = module.interpreter(sys.argv[2])
limits = module.Limits(seconds=2.0, processes=4)
found = module.Sandbox(python, (*visible, sys.argv[3]), namespaces=True, network=False, limits=limits)
print(repr(module.probe(found)))
for source in sys.argv[4:]:
    ended = module.RunningProgram(found, {"main.py": source}).finish()
    print(ended.code, ended.output.strip(), ended.problem)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not os.path.exists(SYSTEM_PYTHON), reason="needs root and a system's python")
def test_an_unprivileged_user_gets_the_same_sandbox() -> None:
    sources = [
        "import os\nprint(os.getuid(), os.listdir('.'), os.path.exists('/etc/passwd'))",
        "",
        HOGS["fork bomb"],
        "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)",
    ]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        shutil.copy(Path(harness.__file__).with_name("launcher.py"), folder)
        os.chmod(folder, 0o755)
        os.mkdir(f"{folder}/own")
        os.chown(f"{folder}/own", 1234, 1234)  # as an environment is its user's own
        sources[1] = f"print(open('{folder}/own/x', 'w'))"
        command = [sys.executable, "-c", AS_ANOTHER_USER, f"{folder}/launcher.py", SYSTEM_PYTHON, f"{folder}/own"]
        command += sources
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = [line.rstrip() for line in done.stdout.splitlines()]
    assert result == ["''", "0 " + NOT_ROOT, "1", "None  ran for more than 2 s", "1"]


def test_a_machine_without_namespaces_is_rejected_unless_the_network_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(sandbox: Sandbox) -> str:
        return "unshare: Operation not permitted" if sandbox.namespaces else ""

    monkeypatch.setattr(code, "probe", refuses)
    with pytest.raises(RewardError, match=r"options.network = 'allowed'"):
        Code(CodeOptions(), "reward")
    assert not Code(CodeOptions(network="allowed"), "reward").sandbox.namespaces
    monkeypatch.setattr(code, "probe", lambda sandbox: "no")
    with pytest.raises(RewardError, match="programs cannot be"):
        Code(CodeOptions(network="allowed"), "reward")
    with pytest.raises(RewardError, match=r"options.python = '/nowhere'.*does not run"):
        Code(CodeOptions(python="/nowhere"), "reward")


def test_a_limit_that_the_start_of_python_exceeds_is_no_reason_to_run_without_namespaces() -> None:
    """As on a crowded machine, where a test program would take longer than a user's limit."""
    quick = Code(CodeOptions(seconds=0.001, network="allowed"), "reward")
    assert quick.sandbox.namespaces and quick.sandbox.limits.seconds == 0.001


def test_its_limits_and_labels_are_checked_at_the_start() -> None:
    with pytest.raises(RewardError, match=r"total_seconds = 9 .*timeout_seconds = 10"):
        open_scorer(config(reward={"function": "code", "options": {"total_seconds": 9.0}}))
    with pytest.raises(RewardError, match="answers with labels"):
        open_scorer(config(data={"label_key": ""}, reward={"function": "code"}))
    settings = {"function": "code", "options": {"tests_key": "tests"}}
    open_scorer(config(data={"label_key": ""}, reward=settings)).close()


EMPTY_FILES = """
count = 0
try:
    while count < 5000:
        open(f"file{count}", "w").close()
        count += 1
except OSError as error:
    print(count, error.strerror)
"""


def test_a_program_creates_no_more_files_than_its_disk_has_pages(sandbox: Sandbox) -> None:
    """Files without content take kernel memory that the size of the disk does not count."""
    small = replace(sandbox, limits=replace(sandbox.limits, disk_mb=2))
    count, _, reason = RunningProgram(small, {"main.py": EMPTY_FILES}).finish().output.strip().partition(" ")
    # 2 MiB of 4 KiB; the folder and the program's own files count, too.
    assert 480 < int(count) < 512 and reason == "No space left on device"
