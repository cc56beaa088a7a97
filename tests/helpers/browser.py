"""Pages in a headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def browser() -> str | None:
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


def opened(page: Path) -> tuple[str, list[str]]:
    """The page's DOM after loading, and what it wrote to the console."""
    program = browser()
    assert program
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    flags += ["--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [program, *flags, f"--user-data-dir={profile}", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
