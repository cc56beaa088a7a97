from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import edgespec
from edgespec_apps.cli import run
from tests.helpers import fake_runtime


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def real_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run `edgespec ARGUMENTS` in this process, with an empty store."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def command(real_command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same on the fake runtime."""
    monkeypatch.setattr(edgespec, "load", fake_runtime.load, raising=False)
    fake_runtime.loads.clear()
    return real_command
