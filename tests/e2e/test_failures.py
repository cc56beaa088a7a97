"""What goes wrong ends in one clear line and a whole store: interrupts in every phase, full disks, damage, parts that do not fit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Street
from tests.helpers.command import Result, edgespec
from tests.helpers.processes import finish, start
from tests.helpers.tiny import tiny_config, tiny_tensors, write_gguf, write_hf

posix = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals, sets POSIX limits")
MAIN = "\nfrom edgespec_apps.cli import main; main()"
# Where a program waits, after saying so, for as long as nobody interrupts it.
WAIT = """
import sys, time
def wait(*arguments, **options):
    print("here", file=sys.stderr, flush=True)
    time.sleep(100)
"""
PHASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "load": ("from edgespec.backends import reference; reference.StoredWeights = wait", ("generate", "x")),
    "prefill": (
        # Short passes, so that a cancel between two of them is what ends the work.
        "from edgespec.orchestrator import loop; loop.PREFILL_ROWS = 2\n"
        "from edgespec.backends.reference import ReferenceEngine\n"
        "forward = ReferenceEngine.forward\n"
        "def slow(self, work, **options):\n"
        "    assert work[0][0].scored == 0, 'the prompt was read to its end'\n"
        "    if work[0][1].length == 2: print('here', file=sys.stderr, flush=True)\n"
        "    time.sleep(0.1); return forward(self, work, **options)\n"
        "ReferenceEngine.forward = slow",
        ("generate", "x" * 200),
    ),
    "decode": (
        "from edgespec.backends.reference import ReferenceEngine\n"
        "forward = ReferenceEngine.forward\n"
        "def slow(self, work, **options):\n"
        "    if work[0][0].scored is None: print('here', file=sys.stderr, flush=True); time.sleep(0.2)\n"
        "    return forward(self, work, **options)\n"
        "ReferenceEngine.forward = slow",
        ("generate", "--max-tokens", "200", "--draft", "none", "x"),
    ),
    "convert": ("from edgespec_converters import parity; parity.streamed_logits = wait", ("convert",)),
    "pull of a file": ("from edgespec_converters.targets import onnx; onnx.write = wait", ("pull",)),
    "pull of a name": ("from edgespec_converters import fetch; fetch._download = wait", ("pull", "smollm2-135m")),
}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    config = tiny_config("llama", layers=1)
    return write_gguf(tmp_path / "fresh.gguf", config, tiny_tensors(config))


@posix
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_is_one_line_code_130_and_a_whole_store(street: Street, gguf: Path, phase: str, tmp_path: Path) -> None:
    setup, arguments = PHASES[phase]
    if arguments[0] == "generate":
        home, options = street.home, ("--model", "llama", "--engine", "reference")
    else:
        home, options = tmp_path / "home", ("--targets", "onnx", *([str(gguf)] if len(arguments) == 1 else []))
    process = start(WAIT + setup + MAIN, *arguments[:1], *options, *arguments[1:], EDGESPEC_HOME=str(home))
    assert process.stderr is not None
    said: list[str] = []
    while (line := process.stderr.readline()) != "here\n":
        assert line, said
        said.append(line)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "Traceback" not in err and "error" not in err
    assert len([line for line in err.splitlines() if line != "here"]) <= 1
    listed = edgespec("models", "--verify", "--json", home=home).line()
    assert listed["damaged"] == {}
    if home != street.home:
        assert listed["packages"] == []
        store_tmp = home / "tmp"
        # What an interrupted run leaves is swept away by the next one, which then succeeds.
        if len(arguments) == 1:
            assert edgespec("convert", str(gguf), "--recipe", "float32", "--targets", "onnx", home=home).code == 0
            assert list(store_tmp.iterdir()) == []


@posix
def test_a_pipe_that_closes_early_is_no_error(street: Street) -> None:
    command = ("generate", "--model", "llama", "--engine", "reference", "--max-tokens", "40", "--draft", "none", "hello")
    process = start(MAIN, *command, EDGESPEC_HOME=str(street.home))
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert code == 0 and "Traceback" not in err and "error" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [["generate", "--model", "llama", "--engine", "reference", "--max-tokens", "3", "hello"], ["models"]])
def test_a_full_disk_under_the_answer_is_one_line(street: Street, arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        process = start(MAIN, *arguments, EDGESPEC_HOME=str(street.home), stdout=full)
        code, _, err = finish(process)
    assert code == 1, err
    [line] = [line for line in err.splitlines() if line.startswith("edgespec: error: ")]
    assert "No space left on device" in line
    assert "Traceback" not in err and "Exception ignored" not in err


def test_too_little_disk_is_said_before_any_work(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    result = edgespec("convert", str(gguf), "--targets", "onnx,mlx", home=tmp_path / "home")
    assert result.code == 1
    assert "free" in result.error() and str(tmp_path) in result.error()
    assert not list((tmp_path / "home").rglob("*.onnx"))


@posix
@pytest.mark.parametrize("target", ["onnx", "mlx"])
def test_a_disk_that_fills_up_while_converting_leaves_the_store_whole(gguf: Path, target: str, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the write fails in the middle."""
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))"
    )
    home = tmp_path / "home"
    code, out, err = finish(start(limit + MAIN, "convert", str(gguf), "--recipe", "float32", "--targets", target, EDGESPEC_HOME=str(home)))
    assert (code, out) == (1, ""), err
    assert len([line for line in err.splitlines() if line.startswith("edgespec: error: ")]) == 1
    assert "Traceback" not in err
    listed = edgespec("models", "--json", home=home).line()
    assert (listed["packages"], listed["damaged"]) == ([], {})
    assert list((home / "tmp").iterdir()) == []


def test_a_pair_whose_vocabularies_differ_is_refused_before_it_is_loaded(street: Street, tmp_path: Path) -> None:
    config = tiny_config("llama", layers=1)
    source = write_hf(tmp_path / "stranger", config, tiny_tensors(config))
    document = json.loads((source / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]  # the same pieces under other ids
    (source / "tokenizer.json").write_text(json.dumps(document))
    assert edgespec("convert", str(source), "--recipe", "float32", "--targets", "mlx", home=tmp_path / "home").code == 0
    draft = tmp_path / "home" / "packages" / "stranger"
    result = street.run("generate", "--model", "llama", "--draft", str(draft), "hello")
    assert (result.code, result.out) == (1, "")
    assert "stranger cannot draft for llama: their vocabularies differ" in result.error()


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated weights": (lambda p: os.truncate(p / "onnx-float32" / "model.data", 1000), "model.data"),
    "missing graph": (lambda p: (p / "onnx-float32" / "model.onnx").unlink(), "model.onnx"),
    "truncated tokenizer": (lambda p: os.truncate(p / "tokenizer.json", 100), "tokenizer.json"),
    "truncated manifest": (lambda p: os.truncate(p / "manifest.json", 100), "manifest.json"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_package_is_one_line_that_names_the_file(street: Street, damage: str, tmp_path: Path) -> None:
    harm, named = DAMAGES[damage]
    shutil.copytree(street.home / "packages" / "llama", tmp_path / "home" / "packages" / "llama")
    harm(tmp_path / "home" / "packages" / "llama")
    for result in (
        edgespec("generate", "--model", "llama", "hello", home=tmp_path / "home"),
        edgespec("models", "--verify", home=tmp_path / "home"),
    ):
        assert result.code == 1
        assert named in result.error()


def test_bytes_that_changed_in_place_are_found_by_verify(street: Street, tmp_path: Path) -> None:
    shutil.copytree(street.home / "packages" / "llama", tmp_path / "home" / "packages" / "llama")
    weights = tmp_path / "home" / "packages" / "llama" / "mlx-int8" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    result = edgespec("models", "--verify", home=tmp_path / "home")
    assert result.code == 1
    assert "model.safetensors" in result.error()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--engine", "reference", "--threads", "2"], 1, "does not choose its threads"),
        (["--draft", "ngram", "--draft-engine", "onnx"], 2, "draft engine 'onnx' has no model to run"),
        (["--draft-engine", "reference"], 2, "the draft is 'ngram'"),
        (["--recipe", "int3"], 1, "has no recipe 'int3'; it has "),
        (["--draft", "llama@int3"], 1, "int3"),
        (["--model", "llama@int8", "--recipe", "int4"], 2, "names recipe 'int8', but recipe 'int4' was asked for"),
        (["--max-context", "8"], 1, "the context holds 8"),
        (["--max-context", "257"], 2, "max_context must lie in 2..256"),
    ],
)
def test_what_does_not_fit_is_refused(street: Street, arguments: list[str], code: int, says: str) -> None:
    result: Result = street.run("generate", "--model", "llama", *arguments, "hello")
    assert (result.code, result.out) == (code, "")
    assert says in result.error()


def test_the_command_as_users_start_it(street: Street) -> None:
    """Once through a real process: text on stdout, words on stderr, the exit code."""
    process = start(MAIN, "generate", "--model", "llama", "--engine", "onnx", "--max-tokens", "5", "--json", EDGESPEC_HOME=str(street.home))
    out, err = process.communicate("hello\n", timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["stats"]["tokens"] == 5
