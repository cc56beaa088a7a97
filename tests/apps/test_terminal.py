"""The chat at a terminal, through a pseudo-terminal."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
import time
from pathlib import Path

import pytest

pty = pytest.importorskip("pty", reason="needs POSIX pseudo-terminals")
ROOT = Path(__file__).parents[2]
PROGRAM = "from tests.helpers.fake_runtime import install; install(); from edgespec_apps.cli import main; main()"


class Terminal:
    def __init__(self, *arguments: str, **environment: str) -> None:
        path = os.pathsep.join(str(ROOT / part) for part in (".", "converters", "device_profiles", "apps"))
        variables = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-c", PROGRAM, *arguments], variables)
        self.seen = b""

    def wait_for(self, pattern: bytes, timeout_s: float = 60) -> None:
        """Read until `pattern` has come after what earlier calls waited for."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.descriptor], [], [], 0.2)[0]:
                self.seen += os.read(self.descriptor, 4096)
        self.seen = self.seen[found.end() :]

    def type(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def end(self) -> int:
        while True:
            try:
                if not os.read(self.descriptor, 4096):
                    break
            except OSError:  # how Linux says that the other side is gone
                break
        _, status = os.waitpid(self.pid, 0)
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(status)


READY = rb"\x1b\[\?2004h[^\n]*>"  # bracketed paste is switched on when a line can be typed


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_chat_at_the_terminal(tmp_path: Path):
    """Lines and continued lines, coloured guesses, Ctrl-C that ends the answer only, Ctrl-D that leaves."""
    terminal = Terminal("chat", "--show-drafted", "--policy", "fixed:4", EDGESPEC_HOME=str(tmp_path), FAKE_STEP_S="0.02")
    terminal.wait_for(READY)
    terminal.type(b"first\\\rsecond\r")
    terminal.wait_for(rb"You said: ")
    terminal.wait_for(rb"\x1b\[32m")
    terminal.wait_for(rb"\[%d tokens, [^\n]*guesses kept per round\]" % len("You said: first\nsecond. You said: first\nsecond.$"))
    terminal.wait_for(READY)
    terminal.type(b"/drafted\r")
    terminal.wait_for(rb"not coloured")
    terminal.wait_for(READY)
    terminal.type(b"x" * 200 + b"\r")
    terminal.wait_for(rb"You said: ")
    terminal.type(b"\x03")
    terminal.wait_for(rb", stopped\]")
    terminal.wait_for(READY)
    terminal.type(b"half a line\x03")
    terminal.wait_for(READY)
    terminal.type(b"/stats\r")
    terminal.wait_for(rb"2 answers")
    terminal.wait_for(READY)
    terminal.type(b"\x04")
    assert terminal.end() == 0
    history = tmp_path / "chat_history"
    assert "+first\n+second" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
