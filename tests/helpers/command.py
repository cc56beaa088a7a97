"""The `edgespec` command inside this process, with a store of its own."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgespec_apps.cli import run


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def line(self) -> dict[str, Any]:
        """The JSON line that --json promises, alone on stdout."""
        assert self.code == 0, self.err
        [line] = self.out.splitlines()
        return json.loads(line)

    def error(self) -> str:
        """The one line that an error is."""
        lines = [line for line in self.err.splitlines() if line.startswith("edgespec: error: ")]
        assert len(lines) == 1 and "Traceback" not in self.err, self.err
        return lines[0].removeprefix("edgespec: error: ")


def edgespec(*arguments: str, home: Path, stdin: bytes = b"") -> Result:
    """Run `edgespec ARGUMENTS`; both streams are captured."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setenv("EDGESPEC_HOME", str(home))
        patch.setenv("COLUMNS", "100")
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = run(arguments)
    return Result(code, out.getvalue(), err.getvalue())
