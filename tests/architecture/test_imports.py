"""The import rules hold, and would notice if they did not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.checkout import PACKAGES, ROOT

_LINT = "import sys; from importlinter.cli import lint_imports_command; sys.argv = ['lint-imports', '--no-cache']; lint_imports_command()"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(root / PACKAGES[name].parent.relative_to(ROOT)) for name in PACKAGES]
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {_LINT}"], cwd=root, capture_output=True, text=True, check=False
    )


def test_the_import_rules_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("edgespec/planted.py", "import edgespec_converters", "apps sit on converters and profiles"),
        ("converters/edgespec_converters/planted.py", "import edgespec_device_profiles", "apps sit on converters and profiles"),
        ("edgespec/drafting/planted.py", "import edgespec.verification", "rooms open onto the core"),
        ("edgespec/core/planted.py", "import edgespec.orchestrator", "rooms open onto the core"),
        ("edgespec/orchestrator/planted.py", "def late():\n    import onnxruntime", "only a backend or a converter"),
        ("apps/edgespec_apps/planted.py", "import mlx.core", "only a backend or a converter"),
        ("edgespec/backends/planted.py", "import torch", "the runtime never reaches for the network"),
        ("edgespec/orchestrator/planted.py", "import urllib.request", "the runtime never reaches for the network"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, module: str, line: str, contract: str):
    for folder in PACKAGES.values():
        shutil.copytree(folder, tmp_path / folder.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / module).write_text(line + "\n")
    result = lint(tmp_path)
    broken = [text for text in result.stdout.splitlines() if text.endswith("BROKEN")]
    assert result.returncode == 1
    assert len(broken) == 1 and broken[0].startswith(contract), result.stdout
