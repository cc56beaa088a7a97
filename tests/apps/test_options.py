"""Every option of every command has an effect or is refused; none is dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from edgespec.orchestrator.runtime import Runtime
from edgespec.orchestrator.session import Session
from edgespec_apps import machine
from edgespec_apps.cli import app
from tests.helpers import fake_runtime
from tests.helpers.command import Result
from tests.helpers.stored import write_package


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--file", "prompt.txt", "-"], "not both"),
        (["models", "--remove", "x", "--verify"], "--remove goes alone"),
        (["models", "--remove", "x", "--json"], "--remove goes alone"),
        (["profile", "--compare", "a", "b", "--quick"], "--compare measures nothing"),
        (["profile", "--compare", "a", "b", "--minutes", "2"], "--compare measures nothing"),
        (["bench", "--peer-gguf", "x.gguf"], "belong to --peer"),
        (["bench", "--peer-python", "python3"], "belong to --peer"),
        (["convert", "x.gguf", "--targets", " , "], "--targets needs onnx, mlx or both"),
    ],
)
def test_an_option_without_its_partner_is_refused(command, arguments: list[str], says: str):
    result: Result = command(*arguments)
    assert (result.code, result.out) == (2, "")
    assert says in result.error()
    assert fake_runtime.loads == []


def test_discarding_a_source_that_is_the_users_own_file_is_refused(real_command, tmp_path: Path):
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    result: Result = real_command("pull", str(tmp_path / "mine.gguf"), "--discard-source")
    assert result.code == 2
    assert "deletes no file that it did not fetch" in result.error()
    assert (tmp_path / "mine.gguf").exists()


def test_discarding_the_source_of_a_model_that_is_there(real_command, tmp_path: Path):
    home = tmp_path / "home"
    write_package(home / "packages" / "smollm2-135m", "smollm2-135m")
    source = home / "sources" / "smollm2-135m"
    source.mkdir(parents=True)
    result: Result = real_command("pull", "smollm2-135m", "--recipe", "int8", "--targets", "onnx", "--discard-source")
    assert result.code == 0 and "already there" in result.err
    assert not source.exists()


def test_colours_without_a_terminal_are_refused_in_words(command):
    result: Result = command("chat", "--show-drafted", stdin=b"a\n")
    assert result.code == 0
    assert "--show-drafted colours text on a terminal only" in result.err


def test_a_draft_chosen_in_the_chat_is_not_bound_to_the_engine_of_the_last_one(command):
    command("chat", "--draft", "none", "--draft-engine", "mlx", stdin=b"/draft ngram\n")
    assert [load["draft_engine"] for load in fake_runtime.loads] == ["mlx", "auto"]


# One probe per option: arguments that must change what is loaded, asked or written. A new option fails here until it has one.
SHARED = {
    "model": ["--model", "other"],
    "draft": ["--draft", "none"],
    "policy": ["--policy", "fixed:2"],
    "verify": ["--verify", "match"],
    "engine": ["--engine", "reference"],
    "draft_engine": ["--draft-engine", "onnx"],
    "require_unit": ["--require-unit", "cpu"],
    "recipe": ["--recipe", "int4"],
    "max_context": ["--max-context", "500"],
    "threads": ["--threads", "1"],
    "energy": ["--energy", "saver"],
    "min_battery": ["--min-battery", "0.3"],
    "max_draft": ["--max-draft", "3"],
    "max_tokens": ["--max-tokens", "3"],
}
SAMPLING = {
    "temperature": ["--temperature", "0.5"],
    "top_k": ["--top-k", "5"],
    "top_p": ["--top-p", "0.5"],
    "min_p": ["--min-p", "0.5"],
    "repetition_penalty": ["--repetition-penalty", "1.5"],
    "presence_penalty": ["--presence-penalty", "1.5"],
    "frequency_penalty": ["--frequency-penalty", "1.5"],
    "bias": ["--bias", "88=100"],
    "seed": ["--seed", "7"],
    "stop": ["--stop", "said"],
    "system": ["--system", "Be brief"],
}
PROBES = {
    "generate": SHARED
    | SAMPLING
    | {
        "prompt": ["other words"],
        "file": ["--file", "prompt.txt"],
        "raw": ["--raw"],
        "logprobs": ["--logprobs", "2"],
        "trace": ["--trace", "trace.jsonl"],
        "as_json": ["--json"],
        "debug": ["--debug"],
    },
    "chat": SHARED | SAMPLING | {"show_drafted": ["--show-drafted"], "debug": ["--debug"]},
    "bench": SHARED
    | {
        "kinds": ["--kinds", "json"],
        "first": ["--prompts", "2"],
        "repeats": ["--repeats", "2"],
        "rivals": ["--rivals", "fixed:1"],
        "peer": ["--peer", "other"],
        "peer_gguf": ["--peer-gguf", "x.gguf"],
        "peer_python": ["--peer-python", "x"],
        "record": ["--record", "r.jsonl"],
        "as_json": ["--json"],
        "debug": ["--debug"],
    },
}
PROBES |= {
    "plan": {
        "device": ["--device", "apple-m1"],
        "model": ["--model", "8b"],
        "draft": ["--draft", "600m"],
        "memory": ["--memory", "6GB"],
        "watts": ["--watts", "0.5"],
        "cores": ["--cores", "1"],
        "case": ["--case", "desktop"],
        "bits": ["--bits", "8"],
        "acceptance": ["--acceptance", "0.4"],
        "context": ["--context", "9000"],
        "as_json": ["--json"],
        "debug": ["--debug"],
    },
    "simulate": {
        "profile": ["--profile", "apple-m1"],
        "model": ["--model", "8b"],
        "draft": ["--draft", "600m"],
        "minutes": ["--minutes", "0.3"],
        "policy": ["--policy", "fixed:1"],
        "case": ["--case", "desktop"],
        "acceptance": ["--acceptance", "0.4"],
        "recording": ["--recording", "absent.jsonl"],
        "seed": ["--seed", "8"],
        "warm": ["--warm", "5"],
        "out": ["--out", "pages"],
        "as_json": ["--json"],
        "debug": ["--debug"],
    },
    "doctor": {"model": ["--model", "absent"], "as_json": ["--json"], "debug": ["--debug"]},
    "models": {"verify": ["--verify"], "remove": ["--remove", "other"], "as_json": ["--json"], "debug": ["--debug"]},
}
# What is given in both runs: always, and for an option that says something about another or about an error.
USUAL = {
    "bench": ["--kinds", "chat", "--prompts", "1", "--repeats", "1", "--max-tokens", "2"],
    "plan": ["--device", "snapdragon-8-elite", "--model", "7b"],
    "simulate": ["--profile", "snapdragon-8-elite", "--model", "7b", "--minutes", "0.1", "--policy", "fixed:4"],
}
ALSO = {
    "logprobs": ["--json"],
    "acceptance": ["--draft", "600m"],
    "debug": ["--model", "absent"],
    "models debug": ["--remove", "absent"],
}


@pytest.fixture
def effects(command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A function of a command and its arguments: what was loaded, what every session was asked, and what came out."""
    asked: list[dict[str, Any]] = []

    def recorded(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            asked.append({"arguments": arguments} | {k: v for k, v in options.items() if k not in ("cancel", "progress")})
            return original(self, *arguments, **options)

        monkeypatch.setattr(kind, name, call)

    recorded(Runtime, "session")
    recorded(Session, "stream")
    monkeypatch.setattr(machine, "bandwidth_gbs", lambda threads: 10.0)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "home" / "packages" / "little"
    write_package(folder, "little")
    (folder / "onnx-int8" / "weights.bin").write_bytes(b"wEights")  # damage of the kind that only --verify sees
    (tmp_path / "prompt.txt").write_text("from a file")

    def run(name: str, arguments: list[str]) -> tuple[object, ...]:
        asked.clear()
        fake_runtime.loads.clear()
        text = {"generate": b"from stdin", "chat": b"a\n"}.get(name, b"")
        result: Result = command(name, *arguments, stdin=text)
        spoken = [line for line in result.err.splitlines() if "tok/s" not in line and "load average" not in line]  # they differ anyway
        out = result.out[:1] if name in ("bench", "doctor", "generate") else result.out  # these tell times and loads
        return fake_runtime.loads.copy(), asked.copy(), sorted(p.name for p in tmp_path.iterdir()), out, spoken

    return run


CASES = [(name, option) for name, options in PROBES.items() for option in options]


@pytest.mark.parametrize(("name", "option"), CASES)
def test_every_option_has_an_effect(effects, name: str, option: str):
    """The two runs differ in what they load, ask, write, say or refuse."""
    usual = USUAL.get(name, []) + ALSO.get(f"{name} {option}", ALSO.get(option, []))
    assert effects(name, usual) == effects(name, usual)
    assert effects(name, usual) != effects(name, usual + PROBES[name][option])


@pytest.mark.parametrize("name", PROBES)
def test_no_option_is_without_a_probe(name: str):
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert sorted(PROBES[name]) == sorted(parameter.name for parameter in command.params)


def test_no_command_is_without_probes():
    """Pulling, converting and profiling take long; what their own options do is tested in test_models.py, test_pull.py, test_profile.py."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert commands.keys() == PROBES.keys() | {"pull", "convert", "profile"}
