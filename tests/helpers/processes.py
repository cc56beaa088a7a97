"""Child processes for tests that kill, block or race them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).parents[2]
_PATHS = (".", "converters", "device_profiles", "apps")


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, with the checkout's packages first."""
    paths = [str(_ROOT / path) for path in _PATHS]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | extra


def start(program: str, *arguments: str, stdout: int | IO[str] = subprocess.PIPE, **extra: str) -> subprocess.Popen[str]:
    """Run Python source in a child; its stdout is read line by line. `extra` goes into its environment."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
    )


def finish(child: subprocess.Popen[str], timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Wait for the child; exit code, stdout, stderr."""
    out, err = child.communicate(timeout=timeout_s)
    return child.returncode, out, err
