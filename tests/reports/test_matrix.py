"""docs/field-reports.md tells the truth: every test that it names exists, and every case that has a test is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.helpers.checkout import ROOT

MATRIX = (ROOT / "docs" / "field-reports.md").read_text(encoding="utf-8")
ROWS = {int(case): row for case, row in re.findall(r"^\| ESB-(\d+) \|(.*)$", MATRIX, re.MULTILINE)}
PROMISED = {*range(1, 10), 13, 15, 16, 18, 21, 22, 23, 29, 33, 34, 36, 40, 41, 43, 46, 48, 51, 55, 57, 59, 63, 64, 65, 66, 68, 73}


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_promised_case_has_a_row_with_tests() -> None:
    assert ROWS.keys() >= PROMISED
    for case, row in ROWS.items():
        assert re.search(r"`tests/[^`]+::test_\w+`", row), case


def test_every_named_test_exists() -> None:
    named: dict[str, set[str]] = {}
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", MATRIX):
        named.setdefault(file, set()).add(test)
    assert len(named) > 10
    for file, tests in named.items():
        assert tests <= functions(ROOT / file), file


def test_every_case_that_a_test_carries_in_its_name_has_a_row() -> None:
    carried: set[int] = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for name in functions(file):
            carried |= {int(number) for run in re.findall(r"esb((?:_\d+)+)", name) for number in run.strip("_").split("_")}
    assert carried <= ROWS.keys()
