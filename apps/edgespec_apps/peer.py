"""Another runtime measured beside ours: the same GGUF file, the same prompts, the same number of threads, in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec_apps.measure import Run, Runner

_SCRIPT = Path(__file__).with_name("peer_llama.py")


class PeerUnavailable(Exception):
    """The peer cannot run here; the message says why."""


class LlamaPeer:
    """llama.cpp in a subprocess that stays alive between answers. A context manager."""

    def __init__(self, gguf: Path, *, context: int, threads: int, python: str = sys.executable) -> None:
        """Raises PeerUnavailable."""
        command = [python, str(_SCRIPT), str(gguf), "--context", str(context), "--threads", str(threads)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise PeerUnavailable(f"cannot start {python}: {error.strerror}") from error
        try:
            self.version = str(self._read()["version"])
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": f"it ended with code {self._process.wait()}"}
        if "error" in reply:
            raise PeerUnavailable(f"llama.cpp: {reply['error']}")
        return reply

    def runner(self, *, lookup: bool) -> Runner:
        def run(prompt_ids: Sequence[int], max_tokens: int) -> Run:
            assert self._process.stdin
            job = {"token_ids": list(prompt_ids), "max_tokens": max_tokens, "lookup": lookup}
            try:
                self._process.stdin.write(json.dumps(job) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise PeerUnavailable(f"llama.cpp: it ended with code {self._process.wait()}") from None
            reply = self._read()
            return Run(token_ids=tuple(reply["token_ids"]), tok_s=reply["tok_s"], ttft_s=reply["ttft_s"])

        return run

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> LlamaPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
