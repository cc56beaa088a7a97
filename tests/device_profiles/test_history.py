from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.core.device import UnitProfile
from edgespec.core.errors import ArtifactError
from edgespec_device_profiles import history
from edgespec_device_profiles.measured import Model
from tests.helpers.timed import MACHINE, example

OTHER = Model(name="other", engine="toy", unit="cpu", weight_bytes=1, kv_bytes_per_token=1)


def test_every_run_gets_a_file_of_its_own(tmp_path: Path) -> None:
    first, second = history.save(example(), tmp_path), history.save(example(), tmp_path)
    assert first == tmp_path / "toy-2-cores" / "20260102-030405-tiny.toml"
    assert second.name == "20260102-030405-tiny-2.toml"
    assert history.load(first) == history.load(second) == example()
    later = history.save(example(date="2026-01-03T00:00:00+00:00"), tmp_path)
    assert sorted(p.name for p in first.parent.iterdir()) == sorted([first.name, second.name, later.name])


def test_a_crash_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history.save(example(), tmp_path)
    before = {p.name: p.read_bytes() for p in (tmp_path / MACHINE.name).iterdir()}

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        history.save(example(date="2026-01-03T00:00:00+00:00"), tmp_path)
    assert {p.name: p.read_bytes() for p in (tmp_path / MACHINE.name).iterdir()} == before


def test_the_newest_of_this_model_then_the_newest_of_any(tmp_path: Path) -> None:
    for date, model in (("2026-01-01", example().model), ("2026-01-02", example().model), ("2026-01-03", OTHER)):
        history.save(example(date=f"{date}T00:00:00+00:00", model=model), tmp_path)
    found = history.latest(tmp_path, MACHINE.name, model="tiny")
    assert found is not None and found.date.startswith("2026-01-02")
    found = history.latest(tmp_path, MACHINE.name, model="unheard-of")
    assert found is not None and found.date.startswith("2026-01-03")
    assert history.latest(tmp_path, "another-machine", model="tiny") is None


def test_one_file_is_read_where_one_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(1, 6):
        history.save(example(date=f"2026-01-0{day}T00:00:00+00:00"), tmp_path)
        history.save(example(date=f"2026-01-0{day}T00:00:00+00:00", model=OTHER), tmp_path)
    read: list[str] = []
    load = history.load
    monkeypatch.setattr(history, "load", lambda file: read.append(file.name) or load(file))
    assert history.latest(tmp_path, MACHINE.name, model="tiny") is not None
    assert read == ["20260105-000000-tiny.toml"]


def test_an_interrupted_or_hot_run_does_not_replace_a_whole_one(tmp_path: Path) -> None:
    """ESB-70: a run in which everything was hot has no figures, so the older cool ones stay in use."""
    cool = example()
    history.save(cool, tmp_path)
    hot = example(date="2026-02-01T00:00:00+00:00", complete=False, units={"cpu": UnitProfile()}, hot_samples=500)
    history.save(hot, tmp_path)
    history.save(example(date="2026-03-01T00:00:00+00:00", complete=False), tmp_path)  # interrupted, but with a cost curve
    assert history.latest(tmp_path, MACHINE.name, model="tiny") == cool


def test_a_damaged_profile_is_named_and_skipped(tmp_path: Path) -> None:
    history.save(example(), tmp_path)
    (tmp_path / MACHINE.name / "99999999-000000-tiny.toml").write_text("schema = 3")
    told: list[str] = []
    assert history.latest(tmp_path, MACHINE.name, model="tiny", on_damaged=lambda e: told.append(str(e))) == example()
    assert len(told) == 1 and "99999999-000000-tiny.toml" in told[0]


def test_a_missing_file_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nothing\.toml.*edgespec profile"):
        history.load(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", "intel-xeon-platinum-8375c-cpu-2-90ghz-4-cores"),
        ("../../etc/passwd", "etc-passwd-4-cores"),
        ("", "4-cores"),
        ("x" * 300, "x" * 80),
    ],
)
def test_machines_have_names_that_are_safe_as_folders(processor: str, name: str) -> None:
    assert history.machine_name(processor, 4) == name
