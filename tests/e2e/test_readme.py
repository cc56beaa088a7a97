"""What README.md tells people to type works: commands parse, options exist, the Python examples run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from edgespec.scheduling.parse import parse_policy
from edgespec_apps.cli import app
from edgespec_converters.registry import entries
from edgespec_device_profiles.estimates import size_from_name
from tests.e2e.conftest import Street
from tests.helpers.checkout import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"`((?:edgespec|make) [^`\n]+)`", README)
COMMANDS = sorted({part.strip() for line in [*"\n".join(SHELL).splitlines(), *INLINE] for part in line.split(" | ") if part.strip()})
MODELS = {entry.name for entry in entries()}


@pytest.mark.skipif(shutil.which("sh") is None, reason="no sh here")
def test_shell_blocks_parse() -> None:
    for block in SHELL:
        subprocess.run(["sh", "-n"], input=block, text=True, check=True)
    assert len(SHELL) > 5


@pytest.mark.parametrize("line", [line for line in COMMANDS if "edgespec" in line.split()[0]])
def test_commands_and_options_exist(line: str) -> None:
    """Typer itself reads the words, and runs nothing."""
    words = shlex.split(line)[1:]
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    context = commands[words[0]].make_context(words[0], words[1:])
    for key in ("model", "draft"):
        name = context.params.get(key)
        known = name is None or name.partition("@")[0] in {"none", "ngram", "auto", "./NAME", *MODELS}
        assert known or (words[0] in ("plan", "simulate") and size_from_name(name))
    if policy := context.params.get("policy"):
        parse_policy(policy)
    spec = context.params.get("spec", "")
    assert "/" in spec or spec in {"", *MODELS}


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    targets = [word for word in shlex.split(line)[1:] if "=" not in word]
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


def test_every_policy_and_model_that_is_described_is_known() -> None:
    described = re.findall(r"`(fixed:\d+|[a-z]+)`", README[README.index("`--policy`") : README.index("None of these options")])
    assert [parse_policy(name).name for name in described] == described
    assert len(described) == 4
    table = re.findall(r"^\| `([\w.-]+)` \| .*\| .* \| .* \|$", README, re.MULTILINE)
    assert set(table) == MODELS


@pytest.mark.parametrize("i", range(len(PYTHON)))
def test_python_examples_run(street: Street, i: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(street.home))
    exec(compile(PYTHON[i].replace("smollm2-135m", "llama"), f"README.md, example {i + 1}", "exec"), {})
    assert capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_package_shows_the_same_example() -> None:
    import edgespec

    assert edgespec.__doc__ is not None
    example = edgespec.__doc__.split("\n\n", 1)[1]
    compile(example, "edgespec.__doc__", "exec")
    assert 'edgespec.open("smollm2-135m")' in example and "smollm2-135m" in MODELS


def test_folders_of_the_store_are_as_described(street: Street) -> None:
    described = re.findall(r"^(packages|sources|tmp|locks)/", README, re.MULTILINE)
    assert sorted(described) == ["locks", "packages", "sources", "tmp"]
    assert {entry.name for entry in os.scandir(street.home) if entry.is_dir()} <= set(described)
    assert (Path(street.home) / "packages" / "llama" / "manifest.json").is_file()
