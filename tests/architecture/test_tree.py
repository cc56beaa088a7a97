"""What may lie in the repository, and how."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from tests.helpers.checkout import PACKAGES, ROOT, tracked_files

TOP_LEVEL = {"pyproject.toml", "edgespec", "converters", "device_profiles", "apps", "tests", "README.md"}
CUSTOMARY = {"LICENSE", "CHANGELOG.md", "Makefile", "docs", ".ci", ".gitignore", ".pre-commit-config.yaml"}
LARGEST_BYTES = 500_000
# Split, so that this file does not find itself.
_FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w.])/" + r"(?:work|root|Users)/",
            r"/home/" + r"[a-z]+/",
            "py" + r"pi\.org",
            "pythonhosted" + r"\.org",
            "huggingface" + r"\.co\b",
            "npm" + r"js\.org",
        ]
    )
)


def _text(path: Path) -> str | None:
    """None for a binary file."""
    try:
        return (ROOT / path).read_bytes().decode()
    except UnicodeDecodeError:
        return None


def test_the_top_level_is_the_floor_plan():
    found = {path.parts[0] for path in tracked_files()}
    assert found - TOP_LEVEL - CUSTOMARY == set()
    assert found >= TOP_LEVEL


def test_each_side_building_holds_one_package():
    for name, folder in PACKAGES.items():
        if folder.parent != ROOT:
            inside = {path.parts[1] for path in tracked_files() if path.parts[0] == folder.parent.name}
            assert inside == {name}


def test_no_file_is_large():
    assert [str(path) for path in tracked_files() if (ROOT / path).stat().st_size > LARGEST_BYTES] == []


def test_text_files_are_tidy():
    untidy: list[str] = []
    for path in tracked_files():
        text = _text(path)
        if not text or path.suffix == ".snap":
            continue
        if "\r" in text or not text.endswith("\n") or text.endswith("\n\n") or re.search(r"[ \t]+$", text, re.MULTILINE):
            untidy.append(str(path))
    assert untidy == []


def test_toml_files_can_be_read():
    for path in tracked_files():
        if path.suffix == ".toml":
            tomllib.loads((ROOT / path).read_text())


def test_no_file_names_a_machine_or_a_registry():
    hits = [f"{path}: {match[0]}" for path in tracked_files() if (text := _text(path)) for match in _FOREIGN.finditer(text)]
    assert hits == []


@pytest.mark.parametrize("text", ["see /" + "work/x", "a /" + "root/.cache", "https://" + "pypi" + ".org/simple", "/home/" + "anna/x"])
def test_the_search_for_them_works(text: str):
    assert _FOREIGN.search(text)


def test_no_torch_anywhere():
    pattern = re.compile(r"^\s*(?:import|from)\s+torch\b", re.MULTILINE)
    python = [path for path in tracked_files() if path.suffix == ".py" and path.parts[0] != "tests"]
    assert python
    assert [str(path) for path in python if pattern.search(_text(path) or "")] == []


def test_programs_can_be_run():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_decision_notes_are_numbered_without_gaps():
    numbers = [path.name[:4] for path in tracked_files() if path.parent == Path("docs/decisions")]
    assert numbers == [f"{i:04}" for i in range(1, len(numbers) + 1)]
