"""`make` on a machine that has nothing: a stand-in Python records what would be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.checkout import ROOT

_PYTHON = """#!/bin/sh
echo "python $*" >> "$LOG"
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin"
  cp "$0" "$3/bin/python"
  cp "$(dirname "$0")/fake-edgespec" "$3/bin/edgespec"
fi
if [ "$1" = "-V" ]; then echo "Python 3.99"; fi
if [ "$1 $2" = "-m pip" ] && [ -n "$PIP_FAILS" ]; then exit 1; fi
exit 0
"""
_EDGESPEC = """#!/bin/sh
echo "edgespec $*" >> "$LOG"
if [ "$1" = chat ]; then sed 's/^/answer to /'; else echo "progress of $1"; fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile, and beside it a PATH that holds a few tools and no Python."""
    folder, tools = tmp_path / "checkout", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    for name in ("sh", "rm", "cp", "mkdir", "touch", "sed", "dirname", "cat"):
        tool = shutil.which(name)
        assert tool is not None
        (tools / name).symlink_to(tool)
    for name, content in (("fake-python", _PYTHON), ("fake-edgespec", _EDGESPEC)):
        (tools / name).write_text(content)
        (tools / name).chmod(0o755)
    return folder


def make(checkout: Path, *arguments: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("make")
    if program is None:
        pytest.skip("make is not installed")
    # Ours, not those of the make that may be running this test.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    clean |= {"PATH": str(checkout.parent / "tools"), "LOG": str(checkout.parent / "log")} | environment
    return subprocess.run([program, *arguments], cwd=checkout, input=given, env=clean, capture_output=True, text=True, check=False)


def calls(checkout: Path) -> list[str]:
    log = checkout.parent / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def test_chat_sets_up_once_and_writes_only_the_answer(checkout: Path):
    first = make(checkout, "chat", "PYTHON=fake-python", given="hello\n")
    assert (first.returncode, first.stdout) == (0, "answer to hello\n"), first.stderr
    done = calls(checkout)
    assert sum("-m venv .venv" in call for call in done) == 1
    assert sum("pip install" in call and call.endswith("--editable .") for call in done) == 1
    assert done[-2:] == ["edgespec pull smollm2-135m", "edgespec chat --model smollm2-135m"]

    second = make(checkout, "chat", "PYTHON=fake-python", given="again\n")
    assert (second.returncode, second.stdout) == (0, "answer to again\n")
    assert calls(checkout) == ["edgespec pull smollm2-135m", "edgespec chat --model smollm2-135m"]


def test_a_changed_pyproject_is_installed_again_into_the_same_environment(checkout: Path):
    make(checkout, "chat", "PYTHON=fake-python")
    calls(checkout)
    later = (checkout / ".venv" / ".runtime").stat().st_mtime + 10
    os.utime(checkout / "pyproject.toml", (later, later))
    assert make(checkout, "chat", "PYTHON=fake-python").returncode == 0
    done = calls(checkout)
    assert any("pip install" in call for call in done) and not any("-m venv" in call for call in done)


def test_a_failed_installation_is_tried_again(checkout: Path):
    assert make(checkout, "chat", "PYTHON=fake-python", PIP_FAILS="1").returncode != 0
    assert not any(call.startswith("edgespec") for call in calls(checkout))
    assert make(checkout, "chat", "PYTHON=fake-python").returncode == 0
    assert any("pip install" in call for call in calls(checkout))


def test_without_a_new_enough_python_it_says_what_to_do(checkout: Path):
    result = make(checkout, "chat")
    assert result.returncode != 0
    assert "edgespec needs Python 3.11 or newer" in result.stderr and "make PYTHON=" in result.stderr
    assert not (checkout / ".venv").exists()


def test_an_old_python3_is_passed_by_for_a_newer_one(checkout: Path):
    tools = checkout.parent / "tools"
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)
    (tools / "python3.12").symlink_to("fake-python")
    assert make(checkout, "chat").returncode == 0
    assert any("-m venv" in call for call in calls(checkout))


def test_ci_runs_the_readmes_test_command():
    readme = (ROOT / "README.md").read_text()
    assert "```sh\nmake test\n```" in readme
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test </dev/null")
