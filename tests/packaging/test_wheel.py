"""The wheel, installed outside the checkout, holds everything it needs and nothing else."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.checkout import PACKAGES, ROOT, tracked_files

DEVICE_LIBRARIES = {
    "mlx",
    "onnxruntime",
    "onnx",
    "coremltools",
    "coreai",
    "torch",
    "tokenizers",
    "sentencepiece",
    "gguf",
    "huggingface_hub",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    installed = subprocess.run([*command, str(wheel)], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    return target


def run(site: Path, program: str, cwd: Path) -> str:
    """stdout of Python source that sees the installed wheel and not the checkout."""
    source = f"import sys; sys.path.insert(0, {str(site)!r})\n{program}"
    result = subprocess.run([sys.executable, "-P", "-c", source], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def scripts(site: Path) -> dict[str, str]:
    """Console scripts and their "module:function"."""
    parser = configparser.ConfigParser()
    parser.read(next(site.glob("edgespec-*.dist-info")) / "entry_points.txt")
    return dict(parser["console_scripts"])


def test_the_wheel_holds_four_packages_and_its_metadata(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_tracked_file_of_the_packages_is_in_the_wheel(wheel: Path):
    """Recipes, profiles, py.typed: whatever lies beside the code travels with it."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    missing = [
        str(path)
        for path in tracked_files()
        for name, folder in PACKAGES.items()
        if (ROOT / path).is_relative_to(folder) and f"{name}/{(ROOT / path).relative_to(folder).as_posix()}" not in inside
    ]
    assert missing == []
    assert {f"{name}/py.typed" for name in PACKAGES} <= inside


def test_importing_edgespec_loads_no_device_library(site: Path, tmp_path: Path):
    program = "import edgespec; print(edgespec.__file__); print(*{name.partition('.')[0] for name in sys.modules})"
    where, loaded = run(site, program, tmp_path).splitlines()
    assert Path(where).is_relative_to(site)
    assert DEVICE_LIBRARIES.isdisjoint(loaded.split())


def test_every_console_script_shows_its_help_and_loads_no_device_library(site: Path, tmp_path: Path):
    assert scripts(site)
    for name, target in scripts(site).items():
        module, _, function = target.partition(":")
        program = (
            f"import {module} as module\n"
            f"sys.argv = [{name!r}, '--help']\n"
            "try:\n"
            f"    code = module.{function}()\n"
            "except SystemExit as end:\n"
            "    code = end.code\n"
            "assert not code, code\n"
            "print(*{name.partition('.')[0] for name in sys.modules})"
        )
        *help_text, loaded = run(site, program, tmp_path).splitlines()
        assert name in "\n".join(help_text)
        assert DEVICE_LIBRARIES.isdisjoint(loaded.split())
