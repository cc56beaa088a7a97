"""Ctrl-C and broken pipes, on whole processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
ROOT = Path(__file__).parents[2]
PROGRAM = "from tests.helpers.fake_runtime import install; install(); from edgespec_apps.cli import main; main()"


def start(*arguments: str, tmp_path: Path, **environment: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "converters", "device_profiles", "apps"))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "EDGESPEC_HOME": str(tmp_path), **environment},
    )


def interrupt_after(process: subprocess.Popen[bytes], stream: IO[bytes] | None, seen: bytes) -> tuple[bytes, bytes]:
    """Ctrl-C as soon as `stream` shows `seen`; what came out in all."""
    assert stream
    before = b""
    while not before.endswith(seen):
        byte = stream.read(1)
        assert byte, process.communicate()
        before += byte
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return (before + out, err) if stream is process.stdout else (out, before + err)


LONG = ("--draft", "none", "--max-tokens", "500", "--raw", "x")


def test_while_answering_the_text_so_far_stays(tmp_path: Path):
    process = start("generate", *LONG, tmp_path=tmp_path, FAKE_STEP_S="0.02")
    out, err = interrupt_after(process, process.stdout, b"awr")
    assert process.returncode == 130
    assert out.endswith(b"\n") and set(out.strip()) <= set(b"raw")
    assert b"Traceback" not in err


def test_json_says_cancelled(tmp_path: Path):
    process = start("generate", "--json", *LONG, tmp_path=tmp_path, FAKE_STEP_S="0.02")
    out, _ = interrupt_after(process, process.stderr, b"working\n")
    answer = json.loads(out)
    assert (process.returncode, answer["finish"]) == (130, "cancelled")
    assert len(answer["token_ids"]) == answer["stats"]["tokens"] < 500


def test_while_loading_it_ends_at_once(tmp_path: Path):
    process = start("generate", "x", tmp_path=tmp_path, FAKE_LOAD_S="100")
    out, err = interrupt_after(process, process.stderr, b"loading\n")
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


def test_a_piped_chat_ends(tmp_path: Path):
    process = start("chat", "--draft", "none", tmp_path=tmp_path, FAKE_STEP_S="0.02")
    assert process.stdin
    process.stdin.write(b"hello hello hello hello\n")
    process.stdin.flush()
    _, err = interrupt_after(process, process.stdout, b"You said")
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize("arguments", [["generate", "--raw", "x", "--max-tokens", "500"], ["models"]])
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, arguments: list[str]):
    process = start(*arguments, tmp_path=tmp_path, FAKE_STEP_S="0.002")
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert process.stderr.read() in (b"", b"working\n")
    process.stderr.close()
    if process.stdin:
        process.stdin.close()
