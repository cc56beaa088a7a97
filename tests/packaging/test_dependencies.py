"""What the code imports is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib

from tests.helpers.checkout import PACKAGES, ROOT

RUN_NOT_IMPORTED = {"pip"}  # a program that `edgespec pull` starts
IMPORT_NAMES = {"protobuf": "google"}  # where it is not the distribution's


def _declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["mlx"]]
    names = {match[0].lower().replace("-", "_") for requirement in requirements if (match := re.match(r"[\w-]+", requirement))}
    return {IMPORT_NAMES.get(name, name) for name in names}


def _imported() -> set[str]:
    found: set[str] = set()
    for folder in PACKAGES.values():
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module)
    return {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - set(PACKAGES)


def test_every_import_is_declared():
    assert _imported() - _declared() == set()


def test_every_declared_library_is_used():
    assert _declared() - RUN_NOT_IMPORTED - _imported() == set()
