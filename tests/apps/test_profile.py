from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.orchestrator.runtime import Runtime
from edgespec_apps import machine
from edgespec_apps.measure import Prompt
from edgespec_apps.profile import this_machine
from edgespec_device_profiles import history
from tests.helpers import fake_runtime
from tests.helpers.processes import environment
from tests.helpers.timed import example

PROMPTS = [Prompt("code-edit", "a", "abc abc"), Prompt("chat", "b", "hello there"), Prompt("chat", "c", "once more")]


@pytest.fixture
def profile(command, monkeypatch):
    """Run `edgespec profile` for a moment on short prompts, without measuring the memory."""
    monkeypatch.setattr(machine, "bandwidth_gbs", lambda **_: 20.0)
    monkeypatch.setattr("edgespec_apps.profile.load_prompts", lambda kinds: PROMPTS)
    return lambda *arguments: command("profile", "--model", "m", "--minutes", "0.01", *arguments)


def files(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.rglob(f"*{ending}"))


def test_json_says_what_was_found_and_where_it_is(profile, tmp_path: Path):
    result = profile("--out", str(tmp_path / "new" / "folder"), "--policy", "window", "--json")
    assert result.code == 0
    [line] = result.out.splitlines()
    report = json.loads(line)
    assert report["schema"] == "edgespec.profile/1"
    assert report["complete"] is True and report["policy"] == "window" and report["model"]["name"] == "m"
    assert set(report["units"]["cpu"]["forward_ms"]) == {"1", "2", "3", "4", "6", "8", "12", "16"}
    assert report["units"]["cpu"]["bandwidth_gbs"] == 20.0
    assert report["best"].keys() == {"code-edit", "chat"}
    assert report["best"]["chat"].keys() == {"draft_tokens", "expected", "measured", "few_rounds"}
    assert report["best_for_all"]["draft_tokens"] >= 0
    file, page = Path(report["files"]["profile"]), Path(report["files"]["report"])
    assert file.parent.parent == tmp_path / "new" / "folder"
    saved = history.load(file)
    assert saved.usable and saved.machine.name == this_machine().name == file.parent.name
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    for stage in ("memory bandwidth", "cost of rows", "acceptance", "speed over time"):
        assert f"profiling: {stage}" in result.err


def test_every_run_adds_to_the_history_and_words_come_without_json(profile, tmp_path: Path):
    for _ in range(2):
        result = profile("--out", str(tmp_path), "--quick")
        assert result.code == 0
        assert result.out.startswith(("Draft ", "Do not draft ")) and "must serve all" in result.out.splitlines()[0]
        assert "on chat" in result.out and "Profile: " in result.out and "Report:  " in result.out
    assert len(files(tmp_path, ".toml")) == len(files(tmp_path, ".html")) == 2


@pytest.mark.parametrize("written", [0, 1], ids=["no profile", "no report"])
def test_a_disk_that_is_full_leaves_the_figures(profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int):
    write_whole, left = history.write_whole, [None] * written

    def full(file: Path, text: str) -> None:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()
        write_whole(file, text)

    monkeypatch.setattr(history, "write_whole", full)
    result = profile("--out", str(tmp_path), "--json")
    assert result.code == 1 and "No space left" in result.error()
    report = json.loads(result.out)
    assert report["complete"] and list(report["files"]) == ["profile"] * written
    assert [str(file) for file in files(tmp_path, ".toml")] == list(report["files"].values())
    left += [None] * written
    words = profile("--out", str(tmp_path)).out
    assert "of the first guesses are right" in words or "anything to guess" in words
    assert words.count("Profile: ") == written and "Report:" not in words


def test_the_next_load_uses_it(profile, command):
    """Profiles of the store are found again, by machine and model."""
    assert command("generate", "--model", "m", "hello").code == 0
    assert profile().code == 0
    assert command("generate", "--model", "m@int8", "hello").code == 0
    before, during, after = (load["profile"] for load in fake_runtime.loads)
    assert before is None and during is None
    assert "with m on toy" in after.provenance and after.units["cpu"].forward_ms[16]


def test_limits_are_kept(profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, object]] = []
    session = Runtime.session
    monkeypatch.setattr(Runtime, "session", lambda self, **options: asked.append(options) or session(self, **options))
    limits = ("--max-context", "200", "--max-draft", "3", "--energy", "saver", "--verify", "greedy", "--policy", "adaptive")
    result = profile(*limits, "--out", str(tmp_path), "--json")
    assert result.code == 0
    report = json.loads(result.out)
    assert set(report["units"]["cpu"]["forward_ms"]["1"]) == {"64"}
    assert {len(kind["offered"]) for kind in report["kinds"].values()} == {3}
    assert {(o["policy"], o["knobs"].energy if o["knobs"] else None) for o in asked} == {  # type: ignore[attr-defined]
        ("fixed:3", None),
        ("fixed:0", None),
        ("adaptive", "saver"),
    }
    assert all(o["verify"] == "greedy" and o["max_context"] <= 200 for o in asked)  # type: ignore[operator]


def test_a_context_without_room_for_any_prompt(profile):
    result = profile("--max-context", "90")
    assert result.code == 2 and "90 tokens is too short" in result.err


def test_a_damaged_profile_is_told_and_no_obstacle(command, tmp_path: Path):
    here = tmp_path / "home" / "profiles" / this_machine().name
    here.mkdir(parents=True)
    (here / "20260101-000000-m.toml").write_text("nonsense")
    result = command("generate", "--model", "m", "hello")
    assert result.code == 0 and fake_runtime.loads[0]["profile"] is None
    assert "ignoring a profile" in result.err and "20260101-000000-m.toml" in result.err


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(profile, tmp_path: Path):
    (tmp_path / "file").touch()
    result = profile("--out", str(tmp_path / "file" / "sub"))
    assert result.code == 1 and fake_runtime.loads == []


def test_a_model_that_is_not_there(profile):
    result = profile("--model", "absent")
    assert result.code == 1 and "edgespec pull absent" in result.err


def test_compare_prints_ratios_and_writes_a_page(command, tmp_path: Path):
    a = history.save(example(), tmp_path)
    b = history.save(example(date="2026-02-02T00:00:00+00:00", other_ms=0.5), tmp_path)
    result = command("profile", "--compare", str(a), str(b))
    assert result.code == 0 and fake_runtime.loads == [], "nothing is measured"
    assert "best draft length on code" in result.out and "B / A" in result.out
    page = a.parent / f"{b.stem}-against-{a.stem}.html"
    assert "Two profiles compared" in page.read_text(encoding="utf-8")
    report = json.loads(command("profile", "--compare", str(a), str(b), "--out", str(tmp_path / "x"), "--json").out)
    assert report["schema"] == "edgespec.profile-compare/1"
    assert {"what": "rest of a round, ms", "a": 0.0, "b": 0.5} in report["differences"]
    assert Path(report["report"]).parent == tmp_path / "x"


def test_compare_with_no_profile(command, tmp_path: Path):
    result = command("profile", "--compare", str(tmp_path / "a.toml"), str(tmp_path / "b.toml"))
    assert result.code == 1 and "a.toml" in result.err


INTERRUPTED = """
from tests.helpers.fake_runtime import install; install()
from edgespec_apps import machine; machine.bandwidth_gbs = lambda **_: 20.0
from edgespec_apps.cli import main; main()
"""


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("stage", ["cost of rows", "speed over time"])
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, stage: str):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, "profile", "--model", "m", "--minutes", "0.05", "--out", str(tmp_path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(EDGESPEC_HOME=str(tmp_path / "home"), FAKE_STEP_S="0.001"),
    )
    assert process.stderr
    for line in process.stderr:
        if line.decode().strip() == f"profiling: {stage}":
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["complete"] is False and b"Traceback" not in err
    assert "interrupted" in report["not_measured"]["speed over time"]
    saved = history.load(Path(report["files"]["profile"]))
    assert saved.usable is (stage == "speed over time")
    assert Path(report["files"]["report"]).is_file()
