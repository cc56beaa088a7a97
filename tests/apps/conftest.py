from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import edgespec
from tests.helpers import fake_runtime
from tests.helpers.command import Result
from tests.helpers.command import edgespec as edgespec_command

Command = Callable[..., Result]


@pytest.fixture
def real_command(tmp_path: Path) -> Command:
    """Run `edgespec ARGUMENTS` in this process, with an empty store."""
    return partial(edgespec_command, home=tmp_path / "home")


@pytest.fixture
def command(real_command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same on the fake runtime."""
    monkeypatch.setattr(edgespec, "load", fake_runtime.load, raising=False)
    fake_runtime.loads.clear()
    return real_command
