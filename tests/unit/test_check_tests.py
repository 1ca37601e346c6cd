"""The check of tests that test nothing: it finds each form of them, and lets what is right pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_tests

pytest_plugins = ["pytester"]

IMPORTS = """
import importlib, json, sys, types
import unittest.mock as mock
from pathlib import Path
from megatron_dppo.rewards import pool
from megatron_dppo.rewards.pool import FunctionPool as Pool
"""

BAD_PATCHES = {
    "a class": "Pool.quick = None",
    "a class in a module": "pool.FunctionPool.quick = None",
    "a module": "pool.replaced = None",
    "an inner import": "def test():\n    from megatron_dppo import rewards\n    rewards.scorer = rewards.scored = None",
    "several targets": "usual, pool.replaced = 1, 2",
    "another name of it": "def test():\n    cls = Pool\n    cls.quick = None",
    "a loop over modules": "def test():\n    for each in (json, pool):\n        each.loads = None",
    "a loop over names": "def test():\n    for name in ('begin', 'quick'):\n        setattr(Pool, name, None)",
    "imported by name": "importlib.import_module('megatron_dppo.rewards.pool').replaced = 1",
    "of the loaded modules": "sys.modules['megatron_dppo.rewards.pool'].replaced = 1",
    "setattr": "setattr(Pool, 'quick', None)",
    "monkeypatch": "def test(monkeypatch):\n    monkeypatch.setattr(Pool, 'quick', None, raising=False)",
    "monkeypatch by a string": "def test(monkeypatch):\n    monkeypatch.setattr('megatron_dppo.rewards.pool.Pool', 1)",
    "monkeypatch of a computed one": "def test(monkeypatch, cls):\n    monkeypatch.setattr(cls, 'a', 1, raising=False)",
    "mock.patch": "mock.patch('megatron_dppo.rewards.pool.FunctionPool.quick', create=True).start()",
    "mock.patch.object": "mock.patch.object(Pool, 'quick', create=True).start()",
    "a decorator": "@mock.patch('megatron_dppo.rewards.gone.Pool')\ndef test(): pass",
    "a class that has moved": "from megatron_dppo.rewards import Pool\nPool.begin = 1",
    "a standard library's": "json.load_all = None",
}
GOOD_PATCHES = {
    "a method": "Pool.close = None",
    "a module's name": "pool.wait = None",
    "an instance": "def test():\n    one = types.SimpleNamespace()\n    one.quick = None",
    "a parameter of the same name": "def test(Pool):\n    Pool.quick = None",
    "a class of the test": "class Own: pass\nOwn.quick = None",
    "by name": "def test(monkeypatch):\n    monkeypatch.setattr('megatron_dppo.rewards.pool.FunctionPool.close', 1)",
    "a package that is not here": "import no_such_package\nno_such_package.x = 1",
    "on purpose": "Pool.quick = None  # creates: a name for the test",
    "an annotation": "from megatron_dppo.types import Metric\nMetric.numerator = 1",
}
PRIVATE_NAMES = {
    "imported": "from megatron_dppo.rewards.pool import _READY_SECONDS",
    "a private module": "import megatron_dppo._gone",
    "of a module": "seconds = pool._READY_SECONDS",
    "of a class": "quick = Pool._quick",
    "of another name": "def test():\n    cls = Pool\n    cls._quick(None)",
    "in a string": "def test(monkeypatch):\n    monkeypatch.setattr('megatron_dppo.rewards.pool._READY_SECONDS', 1)",
    "of an object": "def test():\n    made = Pool(1)\n    made._quick",
    "of an object at once": "Pool(1)._quick",
    "of an object outside": "made = Pool(1)\ndef test():\n    made._quick = None",
    "of an annotated argument": "def test(made: Pool):\n    made._quick.go()",
    "patched": "def test(monkeypatch):\n    monkeypatch.setattr(Pool, '_quick', 1)",
    "patched in a loop": "def test():\n    for name in ('close', '_quick'):\n        setattr(Pool, name, 1)",
}
PROSE = {
    "words alone": "the image does not exist",
    "words beside a key": "loss.topk = 7 has no effect on this loss",
    "one alternative": "no file|the image does not exist",
}
SHORT_MATCHES = {
    "a key and a value": r"loss\\.topk = 7 .*'grpo'",
    "a file and a flag": r"a\\.jsonl:3: .* --allow-changed reward\\.options\\.url",
    "three words": "has no effect",
    "two alternatives": "no such file|no such folder",
    "a quoted text": "'the image does not exist'",
}
PUBLIC_NAMES = {
    "with a reason": "quick = Pool._quick  # reaches: the workers take seconds",
    "a special name": "name = Pool.__name__, pool.__file__",
    "another package's": "import torch\ntorch._C._get_tracing_state()",
    "of an unknown object": "def test(made):\n    made._quick = None",
    "of another package's object": "def test(path: Path):\n    Path('a')._parts, path._parts",
    "of an object with an earlier value": "def test(other):\n    made = Pool(1)\n    made = other\n    made._quick",
    "a named tuple's": "from megatron_dppo.types import Metric\nMetric._replace",
}
BAD_COMPARISONS = {
    "equal": "assert x == x",
    "identical": "assert x.a[0] is x.a[0]",
    "a chain": "assert y == x.a == x.a",
    "tensors": "assert torch.equal(x.weight, x.weight)",
    "runs": "assert_same_run(path / 'run', path / 'run')",
    "close": "torch.testing.assert_close(x, x, rtol=0)",
}
GOOD_COMPARISONS = {
    "two": "assert x == y",
    "twice computed": "assert draw(1) == draw(1)",
    "not a number": "assert x != x",
    "two runs": "assert_same_run(path / 'run', path / 'other')",
}


@pytest.mark.parametrize("text", [*BAD_PATCHES.values(), *BAD_COMPARISONS.values()])
def test_what_tests_nothing_is_found(text: str) -> None:
    assert len(list(check_tests.findings(IMPORTS + text))) >= 1


@pytest.mark.parametrize("quote", ["r", "rf"])
@pytest.mark.parametrize("pattern", [*PROSE.values(), *SHORT_MATCHES.values()])
def test_a_match_keeps_keys_and_at_most_three_words(pattern: str, quote: str) -> None:
    source = f'with pytest.raises(ValueError, match={quote}"{pattern}"):\n    pass'
    assert len(list(check_tests.findings(IMPORTS + source))) == (pattern in PROSE.values())


PARAMETERS = {
    "match=": ("value, words", "(1, {})", "with pytest.raises(ValueError, match=words): pass", 1),
    "escaped": ("value, words", "(1, {})", "with pytest.raises(ValueError, match=re.escape(words)): pass", 1),
    "in str()": ("value, words", "pytest.param(1, {}, id='a')", "assert words in str(error.value)", 1),
    "one parameter": ("words", "{}", "assert words in str(error.value)", 1),
    "another parameter": ("words, value", "({}, 1)", "with pytest.raises(ValueError, match=value): pass", 0),
    "no error": ("words", "{}", "assert words in text", 0),
}


@pytest.mark.parametrize("pattern", [*PROSE.values(), *SHORT_MATCHES.values()])
@pytest.mark.parametrize(("names", "row", "body", "count"), PARAMETERS.values(), ids=PARAMETERS)
def test_a_parameter_that_an_error_must_contain_is_as_short(
    names: str, row: str, body: str, count: int, pattern: str
) -> None:
    rows = "[" + row.format(f'r"""{pattern}"""') + "]"
    for source in (
        f"@pytest.mark.parametrize('{names}', {rows})\ndef test({names}):\n    {body}",
        f"ROWS = {rows}\n@pytest.mark.parametrize({tuple(names.split(', '))}, ROWS)\ndef test({names}):\n    {body}",
    ):
        assert len(list(check_tests.findings(IMPORTS + source))) == (count if pattern in PROSE.values() else 0), source


@pytest.mark.parametrize("text", PRIVATE_NAMES.values(), ids=PRIVATE_NAMES)
def test_a_private_name_of_the_package_is_found(text: str) -> None:
    markers = [finding.marker for finding in check_tests.findings(IMPORTS + text)]
    assert check_tests.REACHES in markers


@pytest.mark.parametrize("text", [*GOOD_PATCHES.values(), *GOOD_COMPARISONS.values(), *PUBLIC_NAMES.values()])
def test_what_is_right_passes(text: str) -> None:
    assert list(check_tests.findings(IMPORTS + text)) == []


def test_the_patch_of_the_kill_drill_as_it_was_is_found() -> None:
    text = "from megatron_dppo.rewards.scorer import RewardScorer\n\nRewardScorer._quick = lambda self, item: None\n"
    finding, private = check_tests.findings(text)
    assert private.marker == check_tests.REACHES
    assert finding[:2] == (
        3,
        "megatron_dppo.rewards.scorer.RewardScorer._quick does not exist before: nothing reads it",
    )


def test_a_parametrization_without_a_case_is_an_error(pytester: pytest.Pytester) -> None:
    pyproject = check_tests.ROOT / "pyproject.toml"
    assert check_tests.setting_problems(pyproject) == []
    settings = pyproject.read_text().partition("[tool.pytest.ini_options]")[2].partition("\n[")[0]
    pytester.makepyprojecttoml(f"[tool.pytest.ini_options]{settings}")
    pytester.makepyfile("import pytest\n@pytest.mark.parametrize('x', [])\ndef test(x): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret and "Empty parameter set" in result.stdout.str()
    without = pytester.path / "other.toml"
    without.write_text("[tool.pytest.ini_options]\n")
    assert check_tests.setting_problems(without) != []


def test_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test():\n    x = 1\n    assert x == x\n")
    assert check_tests.main([str(file)]) == 1
    assert f"{file}:3: x is compared with itself" in capsys.readouterr().out
    file.write_text("assert 1 == 2\n")
    assert check_tests.main([str(file)]) == 0
