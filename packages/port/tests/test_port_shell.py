"""The reader of launch scripts expands words and takes branches as bash does; what it cannot know is unknown."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

from megatron_dppo_port.shell import read_script
from megatron_dppo_port.shell_values import Word

SHOW = "run() { printf '[%s]' \"$@\"; echo; }\n"


def words_of_run(script: str, environment: dict[str, str] | None = None) -> list[Word]:
    (command,) = [c for c in read_script(script, environment or {}).commands if c.words[0].text == "run"]
    return command.words[1:]


def texts_of_bash(scripts: list[str]) -> list[str]:
    """The arguments of ``run`` in each script, by bash itself: one process for all."""
    parts = "".join(f"(\n{script}\n)\necho ===\n" for script in scripts)
    result = subprocess.run(["bash"], input=SHOW + parts, capture_output=True, text=True, check=True)
    return [part.strip("\n") for part in result.stdout.split("===\n")[:-1]]


EXPANSIONS = [
    r'A=1; B="$A two"; C=(a "b c" $B) ; C+=(z); run ${C[@]} "${C[@]}" x$A $B "$B" k=\[1,2\] $((A * 3 + 4))',
    'E=; run ${E:-e} "${E-f}" ${U:-d} ${U:-"q q"} \'$A\' "a\\"b" ${E:+no} x${U+set}',
    ': "${LR:=1e-6}"; run $LR ${LR}',
    "N=$((1024 * 2)); M=${M:-$((N * (3 + 1)))}; K=${K:-$(((N + M) * 2))}; run $N $M $K",
    "run $((7 / 2)) $((-7 / 2)) $((-7 % 3)) $((2 ** 5)) $((1 < 2 && 3 > 4)) $((5 == 5 ? 7 : 8))",
    "P=/a/b.c.sh; run ${P##*/} ${P%/*} ${P%.*} ${P%%.*} ${P#/} ${P/b/X} ${P//\\//_} ${#P} ${P:1:3} ${P: -2}",
    "X=AbC; run ${X,,} ${X^^}; ",
    "A=(1 2 3); run ${#A[@]} ${A[1]} ${A[-1]} ${A[0]} $A",
    "declare -A M=([a]=1 [b]='2 3'); M[c]=4; K=b; run ${M[a]} \"${M[$K]}\" ${M[c]}",
    "X=Y; Y=deep; run ${!X}",
    "X={e,f}; run {c,d}.txt data.f={a,b} --x={1,2} 'k={a,b}' \"k={a,b}\" $X",
    'run $(echo a b) "$(basename /x/y.sh .sh)" $(dirname /x/y.sh) $(seq 2 2 8)',
    "X=5; (( X > 3 )) && Y=big || Y=small; ((X += 2)); let Z=X+1; run $Y $X $Z",
    "f() { local v=$1; G=$v-$2; }; v=out; f in 2; run $v $G",
    "T=; for i in 1 2 3; do T+=$i,; done; for ((j = 0; j < 3; j++)); do T+=x; done; run $T $i $j",
    "S=0; if [ $S -gt 0 ]; then A=yes; elif [[ $S == 0 ]]; then A=zero; else A=no; fi; run $A",
    "L=dppo_tv; case $L in dppo_kl) C=.05 ;; dppo_tv|x) C=.15 ;; *) exit 1 ;; esac; run ${LOW:-$C}",
    "L=abc; case $L in a*) C=1 ;; esac; [[ $L == a?c ]] && D=2; [[ $L != b* ]] && E=3; run $C $D $E",
    'A=(p q); if [ 1 = 1 ]; then A+=(r); fi; if [ 1 = 2 ]; then A=(); fi; run "${A[@]}"',
    'x() { [ "$1" = a ] && return 0; R=later; }; R=first; x a; run $R',
    'set -- a \'b c\'; run $# $1 "$2" "$@"; ',
    'run $# "${1:-none}" "$@"',
    "C='run a=1 b'; $C c",
    'R=(run x); "${R[@]}" y',
    "C='run e=1'; eval \"$C\" f",
    "while getopts ab: O; do X=1; done; cd / && Y=2; run ${X:-none} $Y",
    "while [[ $# -gt 0 ]]; do shift; done; run end",
    "if ! [ -z x ] && { [ a = b ] || [ c = c ]; }; then R=1; fi; run $R",
    "X=1; unset X; run ${X-gone}",
    "X=1; (X=2); echo $X | read Y; run $X",
    "bash -c 'true'; X='a b'; run $X \"$X\"",
]


def test_words_and_branches_are_those_of_bash() -> None:
    told = texts_of_bash(EXPANSIONS)
    for script, expected in zip(EXPANSIONS, told, strict=True):
        words = words_of_run(script)
        assert all(word.unknown is None for word in words), script
        assert "".join(f"[{word.text}]" for word in words if not word.source) == expected, script


def random_script(source: random.Random) -> str:
    """A script of known values with nested conditions, loops and arrays."""
    names = ["A", "B", "C"]
    lines = ["A=1", "B=two", "C=", "L=(s)"]

    def value() -> str:
        choices = [
            "1",
            "two",
            "3",
            '""',
            f"${{{source.choice(names)}:-d}}",
            f'"$A-{source.choice("xyz")}"',
            "$((2 * 3))",
        ]
        return source.choice(choices)

    def condition() -> str:
        name = source.choice(names)
        return source.choice(
            [
                f'[ "${name}" = {source.choice(("1", "two"))} ]',
                f'[[ -z "${name}" ]]',
                f"[[ ${name} == t* ]]",
                f'! [ -n "${name}" ]',
            ]
        )

    def block(depth: int) -> list[str]:
        made = []
        for _ in range(source.randint(1, 3)):
            kind = source.randint(0, 5 if depth < 3 else 1)
            if kind == 0:
                made.append(f"{source.choice(names)}={value()}")
            elif kind == 1:
                made.append(f"L+=({source.choice(names)}=${source.choice(names)})")
            elif kind == 2:
                made += [f"if {condition()}; then", *block(depth + 1), "else", *block(depth + 1), "fi"]
            elif kind == 3:
                made += [
                    f"case ${source.choice(names)} in 1) ",
                    *block(depth + 1),
                    ";; t*)",
                    *block(depth + 1),
                    ";; esac",
                ]
            elif kind == 4:
                made += [f"for I in a {value()}; do", *block(depth + 1), "done"]
            else:
                made.append(f"{condition()} && {source.choice(names)}={value()}")
        return made

    return "\n".join([*lines, *block(0), *block(0), 'run "$A" "$B" "$C" "${L[@]}"'])


def test_random_scripts_of_known_values_end_as_in_bash() -> None:
    scripts = [random_script(random.Random(seed)) for seed in range(300)]
    for script, expected in zip(scripts, texts_of_bash(scripts), strict=True):
        words = words_of_run(script)
        assert all(word.unknown is None for word in words), script
        assert "".join(f"[{word.text}]" for word in words) == expected, script


def test_what_is_known_of_a_random_script_is_true_for_every_environment() -> None:
    """$U is unknown to the reader: its known words must be those of bash for each value that $U may have."""
    scripts = [
        random_script(random.Random(seed)).replace('"$A" = 1', '"$U" = 1').replace('-z "$B', '-z "$U')
        for seed in range(150)
    ]
    outcomes = [texts_of_bash([f"U={value}\n{script}" for script in scripts]) for value in ("1", "two", "", "zz")]
    num_unknown = 0
    for i, script in enumerate(scripts):
        words = words_of_run(script)[:3]
        for j, word in enumerate(words):
            results = {re.findall(r"\[([^\]]*)\]", outcome[i])[j] for outcome in outcomes}
            if word.unknown is None:
                assert results == {word.text}, (script, j)
            num_unknown += word.unknown is not None
    assert num_unknown > 20


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('run "$E"', "$E is not set"),
        ("run $(date)", "only by running"),
        ("if true; then E=1; fi\nif $Q; then E=2; fi\nrun $E", "under a condition (line 2)"),
        ("case $Q in a) E=1 ;; *) E=2 ;; esac\nrun $E", "under a condition (line 1)"),
        ("E=1\n[ -f /x ] && E=2\nrun $E", "under a condition (line 2)"),
        ("for E in $Q; do F=$E; done\nrun $F", "in a loop (line 1)"),
        ("while read E; do F=$E; done < x\nrun $F", "in a loop (line 1)"),
        ("E=1\nfor x in a b; do E=2; break; done\nrun $E", "$E is set in a"),
        ("E=abc\nrun ${E@Q}", "is an unsupported"),
        ("E=abc\nrun $((E + 1))", "'abc' is not an"),
        ("E=1\nsource /elsewhere/settings\nrun $E", "set by source /elsewhere/settings"),
        ("source $Q\nrun ${E:-1}", "$E may be set"),
        ('E=1\neval "$Q"\nrun $E', "set by eval $Q"),
        ("read E\nrun $E", "from the input"),
        ("run ${E:?say it}", "$E must be set"),
        ("f() { if $Q; then return; fi; E=2; }\nE=1; f; run $E", "$E is set under"),
    ],
)
def test_values_that_need_a_shell_are_unknown(text: str, why: str) -> None:
    commands = [c for c in read_script(text, {}).commands if c.words[0].text == "run"]
    assert why in str(commands[-1].words[1].unknown)


def test_a_branch_that_ends_the_script_decides_nothing_behind_it() -> None:
    (word,) = words_of_run('E=1\nif [ -z "$Q" ]; then E=2; exit 1; fi\nrun $E')
    assert (word.text, word.unknown) == ("1", None)


def test_array_words_of_an_unknown_branch_keep_their_text() -> None:
    """The words that both branches have stay known, and the keys of the others can be listed."""
    words = words_of_run('A=(a=1 b=2)\nif $Q; then A=(a=1 c=3); fi\nA+=(d=4)\nrun "${A[@]}"')
    assert {word.text: word.unknown is None for word in words} == {"a=1": True, "b=2": False, "c=3": False, "d=4": True}
    words = words_of_run('A="a=1 b=2"\nif $Q; then A="a=1 c=3"; fi\nrun $A')
    assert {word.text: word.unknown is None for word in words} == {"a=1": True, "b=2": False, "c=3": False}


def test_branches_keep_what_they_share_beside_an_unknown_part() -> None:
    script = 'A="a=$R/m b=2"\nif $Q; then A="$A c=3"; else A="$A c=4"; fi\nB="$A d=5"\nrun $B'
    known = {word.text: word.unknown is None for word in words_of_run(script)}
    assert known == {"a=$R/m": False, "b=2": True, "c=3": False, "c=4": False, "d=5": True}


def test_a_word_with_too_many_values_has_no_key() -> None:
    branches = "".join(f"if $Q{i}; then A=k{i}=1; fi\n" for i in range(20))
    words = words_of_run(f"A=a=1\n{branches}run $A")
    assert all(word.unknown for word in words) and "(several_values)" in [word.text for word in words]


def test_the_known_words_of_a_text_with_an_unknown_part_stay_known() -> None:
    words = words_of_run('A="a=1 b=$Q/x c=$(date +%s)z d=2"\nrun $A')
    assert [(word.text, word.unknown is None) for word in words] == [
        ("a=1", True),
        ("b=$Q/x", False),
        ("c=$(date+%s)z", False),
        ("d=2", True),
    ]


def test_sourced_files_are_read_inside_the_root_alone(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "values.sh").write_text("source $(dirname ${BASH_SOURCE[0]})/more.sh\nE=1\n")
    (tmp_path / "in" / "sub" / "more.sh").write_text(f"F=2\ntouch {tmp_path}/trap\n")
    (tmp_path / "out.sh").write_text("E=9\n")
    (tmp_path / "in" / "link.sh").symlink_to(tmp_path / "out.sh")
    file, root = tmp_path / "in" / "run.sh", tmp_path / "in"
    here = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'

    def last(text: str) -> list[Word]:
        return read_script(here + text, {}, file, root).commands[-1].words[1:]

    assert [word.text for word in last('source "$D/sub/values.sh"\nrun $E $F')] == ["1", "2"]
    assert not (tmp_path / "trap").exists()
    for path in ("$D/../out.sh", "$D/link.sh", "$D/missing.sh", "/etc/profile.d/x"):
        assert "which was not read" in str(last(f'E=1\nsource "{path}"\nrun $E')[0].unknown), path
    for path in ("/opt/conda/bin/activate", "~/.bashrc", "/usr/local/Ascend/set_env.sh"):
        assert last(f"E=1\nsource {path}\nrun $E")[0].unknown is None, path
