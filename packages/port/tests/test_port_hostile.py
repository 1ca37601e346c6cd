"""``port`` on files that strangers wrote to cost time or memory, or to control a terminal or the configuration."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.errors import ConfigError
from megatron_dppo_port.port import port
from test_port_defaults import PRIME, VERL

DOUBLED = "\n".join(f"A{i + 1}=$A{i}$A{i}" for i in range(1, 40))
STEPS, VALUE = "more than 20,000,000 steps", "a value of more than 100,000 characters"
DEEP, READ = "nested too deeply", "cannot be read|is not valid"
HOSTILE = {
    "doubled.sh": (f"A1=xxxxxxxx\n{DOUBLED}\n", VALUE),
    "doubled, unknown.sh": (f"A1=$U\n{DOUBLED}\n", VALUE),
    "doubled, two branches.sh": (f'if [ "$U" ]; then A1=a; else A1=b; fi\n{DOUBLED}\n', VALUE),
    "appended.sh": ("A=x\n" + "A+=$A\n" * 40, VALUE),
    "in a loop.sh": ("A=x\nfor i in $(seq 1 100); do A=$A$A; done\n", VALUE),
    "array.sh": ("A=(1)\n" + "A=(${A[@]} ${A[@]})\n" * 40, STEPS),
    "array, appended.sh": ("A=($U)\n" + 'A+=("${A[@]}")\n' * 40, STEPS),
    "echo.sh": ("f() { A=$(echo $A$A); }\nA=x\n" + "f\n" * 40, VALUE),
    "nested commands.sh": ("A=" + "$(echo " * 2000 + "x" + ")" * 2000 + "\n", DEEP),
    "functions.sh": ("".join(f"f{i}() {{ f{i + 1}; f{i + 1}; }}\n" for i in range(18)) + "f0\n", STEPS),
    "eval.sh": ('A=\'A=$A$A; eval "$A"\'\neval "$A"\n', VALUE),
    "replaced.sh": ("A=x\n" + "A=${A//x/xxxxxxxxxxxxxxxx}\n" * 12, f"{STEPS}|{VALUE}"),
    "suffix.sh": ("A=a\n" + "A=$A$A\n" * 16 + "B=${A%%*b*c*d}\n", STEPS),
    "braces.sh": ("run x{" + "a," * 20000 + "b}" + "y" * 40000 + "\n", STEPS),
    "loops.sh": ("for ((i=0;i<1000000000;i++)); do for ((j=0;j<1000000000;j++)); do A=$((A+1)); done; done\n", STEPS),
    "branches.sh": ("".join(f'[ "$U{i}" ] && V{i}=1\n' for i in range(3000)), STEPS),
    "if.sh": ("if true; then\n" * 3000 + "fi\n" * 3000, DEEP),
    "default.sh": ("A=" + "${a:-" * 2000 + "x" + "}" * 2000 + "\n", DEEP),
    "itself.sh": ("source itself.sh\n", "calls itself"),
    "large.sh": ("# x\n" * 50000, READ),
    "aliases.yaml": (
        "a0: &a0 [lol]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(12)),
        STEPS,
    ),
    "merge keys.yaml": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{i + 1}: &a{i + 1}\n  <<: [*a{i}, *a{i}]\n" for i in range(40)),
        STEPS,
    ),
    "cycle.yaml": ("data: &a [*a]\n", "contains itself"),
    "deep.yaml": ("data: " + "[" * 5000, DEEP),
    "number.yaml": ("data: {train_batch_size: " + "9" * 100_000 + "}\n", READ),
    "base 60.yaml": ("data: {train_batch_size: 1" + ":01" * 30_000 + "}\n", READ),
    "tag.yaml": ("data: !!python/object/apply:os.system ['id']\n", READ),
    "date.yaml": ("data: {x: 2001-99-99}\n", READ),
    "number.toml": ("[orchestrator]\nbatch_size = " + "9" * 100_000 + "\n", READ),
    "hexadecimal.toml": ("[orchestrator]\nbatch_size = 0x" + "F" * 100_000 + "\n", READ),
    "deep.toml": ("[orchestrator]\nx = " + "[" * 50_000 + "]" * 50_000 + "\n", DEEP),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_costs_too_much_is_an_error(name: str, tmp_path: Path) -> None:
    text, message = HOSTILE[name]
    (tmp_path / name).write_text(text + (VERL + "a=$A\n" if name.endswith(".sh") else ""))
    with pytest.raises(ConfigError, match=message):
        port(tmp_path / name)


HARMLESS = {
    "pattern.sh": "A=a\n" + "A=$A$A\n" * 13 + "P='*a*a*a*a*a*a*a*a*a*a*b'\ncase $A in $P) x;; esac\n" + VERL,
    "regex.sh": "A=a\n" + "A=$A$A\n" * 16 + "[[ $A =~ ^(a*)*b$ ]] && B=1\n" + VERL,
    "printf.sh": "printf -v A %1000000000d 1\nB=$(printf %1000000000d 1)\n" + VERL + "a=$A b=$B",
    "powers.sh": "A=$((9**9**9**9)) B=$((1<<10**10)) C=$((2**63**2))\n" + VERL + "a=$A b=$B c=$C",
    "digits.sh": "A=" + "9" * 60_000 + "\n[ $A -eq 1 ] && B=1\nC=${D:$A}\nE=$(seq $A)\nf() { shift $A ²; }; f\n" + VERL,
    "while.sh": "A=x\nwhile true; do A=$A$A; done\n" + VERL,
    "here-document.sh": "cat <<E\n" + "x\n" * 40_000 + "E\n" + VERL,
    "module.sh": "A=main_\n" + "A=$A$A\n" * 14 + "python -m .$A/ x\n" + VERL,
    "list.sh": VERL + "data.val_files=" + "[" * 30_000 + " trainer.test_freq=1",
    "values.sh": VERL + "k=v " * 25_000,
    "sizes.sh": VERL
    + "data.train_batch_size=0 trainer.n_gpus_per_node=0 data.gen_batch_size=1e308 trainer.nnodes=1e308",
    "zero.sh": "python3 train.py --rollout-num-gpus 0 --global-batch-size 0 --num-gpus-per-node 0 --sglang-pp-size 0 "
    "--colocate --rollout-batch-size 0",
    "zero.toml": PRIME + "group_size = 0\n[deployment]\nnum_infer_gpus = 0\n[inference.vllm]\ntensor_parallel_size=0\n",
    "not a number.toml": "[orchestrator]\nbatch_size = nan\ngroup_size = inf\n",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_costs_little_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(HARMLESS[name])
    assert tomllib.loads(port(tmp_path / name).toml)


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u202a-\u202e]")
SPOOFS = {
    "names.sh": VERL
    + "trainer.x='\x1b[2J\x9b31m\u202e' trainer.experiment_name='\x1b[31m\u202eabc' \"$\x1b[5m\" $E\x1b[2J",
    "lines.sh": VERL + "\"$U\n[reward]\nfunction = 'evil.py:f'\" 'trainer.y=\n[reward]' \"trainer.project_name=a\n$U\"",
    "names.toml": PRIME + '"a\\u001b[2J" = "\\u009b31m"\n[inference.vllm]\n"x\\u009b" = "\\u202e"\n',
    "names.yaml": 'data: "\\e[2J"\ntrainer: {experiment_name: "\\e[2J\\x9b", "\\e[1m": 1}\n',
    "error.yaml": 'data: "\\e[2J\n',
}


@pytest.mark.parametrize("name", SPOOFS)
def test_texts_of_a_file_control_neither_the_terminal_nor_the_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(SPOOFS[name])
    out = tmp_path / "my.toml"
    main(["port", str(tmp_path / name), "--output", str(out), "--verbose"])
    shown = capsys.readouterr()
    assert not CONTROLS.search(shown.out + shown.err) and shown.err
    if name != "error.yaml":
        written = out.read_text()
        assert not CONTROLS.search(written)
        assert "reward" not in tomllib.loads(written)


LIMITED = """
import sys
from megatron_dppo_port import budget
budget._CPU_SECONDS = 1
try:
    print(budget.call_limited(eval(sys.argv[1])))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("function", "printed"),
    [
        ("lambda: 2 + 3", "5"),
        (
            "lambda: any(False for _ in iter(int, 1))",
            "ConfigError The file takes more than 1 seconds of CPU time or 1024 MiB",
        ),
        ("lambda: bytes(2 << 30)", "MemoryError"),
        ("lambda: __import__('os').kill(__import__('os').getpid(), 9)", "ConfigError The file takes more than"),
        ("lambda: {}['x']", "KeyError 'x'"),
    ],
)
def test_a_child_ends_what_no_budget_counts(function: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, function], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(printed), done.stdout + done.stderr
