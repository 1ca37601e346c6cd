"""Each error text is in the golden table, where a reviewer sees what users read. Tests ask for class, key and value."""

from __future__ import annotations

from pathlib import Path

from tools.list_errors import GOLDEN, ErrorText, error_texts, golden_lines

SOURCE = """
def check(key, value):
    if value < 0:
        raise ConfigError(f"{key} = {value!r}: expected a number of at least 0. " + "Fix: raise it")
    problems.append(ConfigError(str(value)))
    raise TypeError("a list")
"""


def test_the_golden_table_has_every_error_text() -> None:
    written, current = set(GOLDEN.read_text("utf-8").splitlines()), set(golden_lines())
    difference = [f"- {line}" for line in sorted(written - current)] + [
        f"+ {line}" for line in sorted(current - written)
    ]
    fix = "Fix: read each new text as a user would, then run `python tools/list_errors.py --write`"
    assert not difference, "\n".join(["Texts that have changed:", *difference, fix])


def test_names_and_places_do_not_change_the_table(tmp_path: Path) -> None:
    file = tmp_path / "check.py"

    def templates(source: str) -> list[tuple[str, str]]:
        file.write_text(source)
        return [(error.class_name, error.template) for error in error_texts(file, {"ConfigError"}, every_raise=True)]

    text = "{} = {}: expected a number of at least 0. Fix: raise it"
    assert templates(SOURCE) == [("ConfigError", text), ("ConfigError", "{}"), ("TypeError", "a list")]
    assert templates("\n\n" + SOURCE.replace("value", "number")) == templates(SOURCE)
    assert templates(SOURCE.replace("at least 0", "0 or more")) != templates(SOURCE)


def test_the_table_for_review_names_place_and_expressions(tmp_path: Path) -> None:
    file = tmp_path / "check.py"
    file.write_text(SOURCE)
    first, second = error_texts(file, {"ConfigError"})
    text = "{key} = {value}: expected a number of at least 0. Fix: raise it"
    template = text.replace("key", "").replace("value", "")
    assert first == ErrorText(file, 4, "ConfigError", text, template)
    assert (second.line, second.text) == (5, "{str(value)}")
