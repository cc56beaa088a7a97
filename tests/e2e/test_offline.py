"""After a model is pulled nothing opens a socket, and nothing does at import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.backends.onnx import BACKEND as ONNX
from edgespec.orchestrator import store
from edgespec_converters.registry import DEFAULT
from tests.e2e.conftest import Street
from tests.helpers.engines import ENGINES
from tests.helpers.processes import finish, start
from tests.helpers.stored import write_package

# Python raises this event before it creates, resolves or connects anything. Local pairs (event loops) are no network.
_GUARD = """
import sys
def guard(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "socket.sendto"):
        print("NETWORK", event, arguments, file=sys.stderr, flush=True)
        raise PermissionError("network use: " + event)
sys.addaudithook(guard)
"""


def test_the_guard_sees_a_connection():
    code, _, err = finish(start(_GUARD + "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)"))
    assert code != 0 and "NETWORK" in err


def test_importing_every_module_opens_no_socket():
    code, out, err = finish(
        start(
            _GUARD + "import importlib, pkgutil, edgespec, edgespec_converters, edgespec_device_profiles, edgespec_apps\n"
            "count = 0\n"
            "for package in (edgespec, edgespec_converters, edgespec_device_profiles, edgespec_apps):\n"
            "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
            "        if not module.name.endswith('__main__'):\n"
            "            importlib.import_module(module.name)\n"
            "            count += 1\n"
            "print(count)\n"
        )
    )
    assert code == 0 and "NETWORK" not in err, err
    assert int(out) > 20


def test_the_store_is_used_without_a_socket(tmp_path: Path):
    write_package(tmp_path / "toy", "toy")
    code, out, err = finish(
        start(
            _GUARD + "from edgespec.orchestrator import store\n"
            "store.verify(store.find_package(sys.argv[1])); store.sweep()\n"
            "print(len(store.list_packages()))\n",
            str(tmp_path / "toy"),
            EDGESPEC_HOME=str(tmp_path / "home"),
        )
    )
    assert (code, out, "NETWORK" in err) == (0, "0\n", False), err


@pytest.mark.parametrize("engine", [case.name for case in ENGINES])
def test_a_tiny_model_answers_without_a_socket(street: Street, engine: str):
    [case] = [case for case in ENGINES if case.name == engine]
    if reason := case.backend.why_not():
        pytest.skip(reason)
    program = _GUARD + "from edgespec_apps.cli import run\nsys.exit(run(sys.argv[1:]))"
    drawn = ("--temperature", "0.8", "--bias", "0=-100", "--bias", "2=-100", "--max-tokens", "8", "--json")  # no stop before the end
    options = ("--engine", engine, "--draft", "llama-gguf", "--draft-engine", "reference", *drawn)
    code, out, err = finish(start(program, "generate", "--model", "llama", *options, "Say hello.", EDGESPEC_HOME=str(street.home)))
    assert code == 0 and json.loads(out)["stats"]["tokens"] == 8 and "NETWORK" not in err, err


@pytest.mark.real
def test_a_model_answers_without_a_socket():
    if not store.is_installed(DEFAULT):
        pytest.skip(f"{DEFAULT} is not in the store; run `make model`")
    program = _GUARD + "from edgespec_apps.cli import run\nsys.exit(run(sys.argv[1:]))"
    code, out, err = finish(start(program, "generate", "--model", DEFAULT, "--max-tokens", "4", "Say hello."), timeout_s=240)
    assert code == 0 and out.strip() and "NETWORK" not in err, err


def _left_behind(home: Path, program: str, *arguments: str, **extra: str) -> list[str]:
    """Files that a run leaves in the user's home. A library's own telemetry opens no socket that Python could see: it shows here."""
    home.mkdir()
    caches = {"HOME": str(home), "XDG_CACHE_HOME": "", "XDG_DATA_HOME": "", "USERPROFILE": str(home)}
    said_no = {"ORT_DISABLE_TELEMETRY": "", "CI": ""}  # where either is set, the library keeps quiet anyway
    code, _, err = finish(start(program, *arguments, **caches, **said_no, **extra))
    assert code == 0, err
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


@pytest.mark.skipif(ONNX.why_not() is not None, reason=str(ONNX.why_not()))
def test_the_engines_library_reports_to_nobody(street: Street, tmp_path: Path):
    bare = "import sys, time, onnxruntime\nonnxruntime.InferenceSession(sys.argv[1])\ntime.sleep(0.5)"
    model = str(next((street.home / "packages" / "llama").glob("onnx-*/model.onnx")))
    if not any("onnxruntime" in file for file in _left_behind(tmp_path / "bare", bare, model)):
        pytest.skip("here the library reports nothing by itself, so that we keep it from reporting would prove nothing")
    ours = "import sys\nfrom edgespec_apps.cli import run\nsys.exit(run(sys.argv[1:]))"
    arguments = ("generate", "--model", "llama", "--engine", "onnx", "--max-tokens", "4", "Say hello.")
    assert _left_behind(tmp_path / "ours", ours, *arguments, EDGESPEC_HOME=str(street.home)) == []
