from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import edgespec
from tests.helpers.processes import finish, start
from tests.helpers.stored import write_package

COMMANDS = ("chat", "generate", "pull", "convert", "models", "bench", "doctor")


def test_help_names_every_command(command):
    result = command("--help")
    assert result.code == 0
    assert all(name in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(command, name):
    result = command(name, "--help")
    assert result.code == 0
    assert "--debug" in result.out


@pytest.mark.parametrize(("name", "panels"), [("generate", True), ("chat", True), ("bench", False)])
def test_shared_options_are_the_same_everywhere(command, name, panels):
    text = command(name, "--help").out
    assert all(option in text for option in ("--model", "--draft", "--policy", "--engine", "--recipe", "--threads", "--max-context"))
    assert ("--repetition-penalty" in text) is panels


def test_no_arguments_show_the_help_and_count_as_wrong_usage(command):
    result = command()
    assert (result.code, result.err) == (2, "")
    assert "Usage: edgespec" in result.out


def test_the_nearest_model_is_named(real_command, tmp_path: Path):
    assert "did you mean smollm2-135m? Get it: edgespec pull smollm2-135m" in real_command("generate", "-m", "smolm2-135m", "x").error()
    write_package(tmp_path / "home" / "packages" / "mine", "mine")
    assert real_command("generate", "-m", "mime", "x").error().endswith("did you mean mine?")
    assert real_command("generate", "-m", "qwen2.5-coder-0.5b", "x").error().endswith("run `edgespec pull qwen2.5-coder-0.5b`")


def test_a_store_that_is_a_file_is_one_clear_error(real_command, tmp_path: Path):
    (tmp_path / "home").write_text("")
    assert real_command("models").error() == f"EDGESPEC_HOME names {tmp_path / 'home'}, which is a file; set it to a folder"


def test_version(command):
    assert command("--version").out == edgespec.__version__ + "\n"


@pytest.mark.parametrize("arguments", [["frobnicate"], ["chat", "--frobnicate"], ["pull"]])
def test_wrong_usage_is_one_line(command, arguments):
    result = command(*arguments)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("edgespec: error: ")


def test_help_loads_no_heavy_library():
    heavy = ("numpy", "onnxruntime", "mlx", "tokenizers", "jinja2", "sentencepiece", "gguf", "prompt_toolkit", "onnx")
    code = (
        "import sys; from edgespec_apps.cli import run; assert run(['generate', '--help']) == 0;"
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("closed", "arguments", "code", "says"),
    [
        ("stdin", ["generate"], 2, "the prompt from standard input is empty"),
        ("stdin", ["chat"], 0, "on toy, draft ngram"),
        ("stdout", ["generate", "hello"], 0, ""),
        ("stderr", ["generate", "hello"], 0, ""),
    ],
)
def test_a_stream_that_was_closed_before_the_start_is_an_empty_one(closed: str, arguments: list[str], code: int, says: str):
    program = f"import sys; sys.{closed} = None; from tests.helpers.fake_runtime import install; install()"
    found, out, err = finish(start(f"{program}; from edgespec_apps.cli import main; main()", *arguments))
    assert found == code, err
    assert says in err and "unexpected" not in err
    assert bool(out) is (closed == "stderr")
