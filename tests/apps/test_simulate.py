from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgespec.core.errors import ArtifactError
from edgespec_apps import cli
from edgespec_apps.simulation import DEFAULT_POLICIES, Scene, compare, summary
from edgespec_apps.texts import Constant
from edgespec_device_profiles import cooling, registry
from edgespec_device_profiles.estimates import bandwidth_gbs, pass_ms, size_from_name

FIXED = tuple(name for name in DEFAULT_POLICIES if name.startswith("fixed"))


def scene(chip: str, case: str, target: str, draft: str | None, minutes: float = 10.0, alpha: float = 0.75) -> Scene:
    return Scene(
        chip=registry.load(chip),
        case=cooling.case(case),
        target=size_from_name(target),
        draft=size_from_name(draft) if draft else None,
        text=Constant(alpha),
        minutes=minutes,
    )


def test_the_same_seed_gives_the_same_run() -> None:
    where = scene("apple-m4", "fanless", "8b", "600m", minutes=0.5)
    runs = [summary(*where.run(where.policy("adaptive+governor"))) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("chip", "target", "draft"), [("apple-a19-pro", "2b", "300m"), ("snapdragon-8-elite", "3b", None)])
def test_on_a_phone_the_governor_wins_by_moving_to_the_cooler_unit(chip: str, target: str, draft: str | None) -> None:
    rows = compare(scene(chip, "phone", target, draft), ("fixed:3", "fixed:4", "fixed:6", "fixed:7", "adaptive+governor"))
    governed = rows.pop("adaptive+governor")
    best = max(rows.values(), key=lambda row: row["tokens"])
    assert governed["tokens"] > 1.1 * best["tokens"]
    assert governed["peak_c"] < cooling.CASES["phone"].limit_c + 8.0  # below the critical line
    assert governed["energy_j"] / governed["tokens"] < best["energy_j"] / best["tokens"]
    assert governed["plan_flips"] <= 10 * 60 / 5


def test_a_fanless_laptop_gains_when_there_is_time_to_get_hot() -> None:
    rows = compare(scene("apple-m4", "fanless", "8b", "600m", minutes=30), ("fixed:3", "adaptive+governor"))
    assert rows["adaptive+governor"]["tokens"] > 1.1 * rows["fixed:3"]["tokens"]
    assert rows["fixed:3"]["tok_s_last_minute"] < 0.6 * rows["fixed:3"]["tok_s_first_minute"]
    assert rows["adaptive+governor"]["plan_flips"] <= 30 * 60 / 10


def test_where_nothing_gets_hot_the_governor_changes_nothing() -> None:
    rows = compare(scene("apple-m2-ultra", "desktop", "14b", "600m", minutes=2), (*FIXED, "adaptive", "adaptive+governor"))
    assert rows["adaptive+governor"] == rows["adaptive"]
    assert rows["adaptive"]["tokens"] > 0.97 * max(rows[name]["tokens"] for name in FIXED)
    assert rows["fixed:3"]["tok_s_last_minute"] == pytest.approx(rows["fixed:3"]["tok_s_first_minute"], rel=0.05)


def test_the_phone_stays_close_to_the_runs_it_was_fitted_to() -> None:
    assert cooling.phone_fit_error() < 0.05
    for _, _, _, onset_s, published_s in cooling.phone_fit():
        assert 0.5 < onset_s / published_s < 1.5


def test_costs_follow_from_bandwidth_and_compute() -> None:
    chip, size = registry.load("apple-m4"), size_from_name("8b")
    one = pass_ms(chip, "gpu", size, rows=1, context=0)
    assert one >= size.weight_bytes / (bandwidth_gbs(chip, "gpu") * 1e9) * 1e3
    assert one < pass_ms(chip, "gpu", size, rows=8, context=0) < 8 * one
    assert pass_ms(chip, "gpu", size, rows=1, context=4096) > one
    assert pass_ms(chip, "npu", size, rows=1, context=0) > one  # the NPU reads more slowly


@pytest.mark.parametrize(
    ("name", "parameters"), [("7b", 7e9), ("qwen2.5-coder-1.5b", 1.5e9), ("smollm2-135m", 135e6), ("Gemma-3-270M-it", 270e6)]
)
def test_sizes_from_names(name: str, parameters: float) -> None:
    assert size_from_name(name).parameters == pytest.approx(parameters)


def test_a_name_without_a_size_is_refused() -> None:
    with pytest.raises(ArtifactError, match="names no size"):
        size_from_name("mystery-model")


def test_the_command_ends_with_one_json_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    arguments = ["simulate", "--profile", "apple-m4", "--model", "8b", "--minutes", "0.2", "--policy", "fixed:2", "--policy", "adaptive"]
    assert cli.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "edgespec.simulate/1" and found["profile"] == "apple-m4" and found["minutes"] == 0.2
    assert set(found["policies"]) == {"fixed:2", "adaptive"}
    wanted = {"tokens", "tok_s_first_minute", "tok_s_last_minute", "peak_c", "energy_j", "plan_flips"}
    assert all(wanted <= set(row) for row in found["policies"].values())
    assert 0 <= found["fit_error"] < 0.05
    assert cli.run(arguments) == 0
    printed = capsys.readouterr().out
    assert "Estimates" in printed and "published" in printed


def test_unknown_chips_and_policies_are_clear_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["simulate", "--profile", "apple-m99", "--model", "8b"]) == 1
    assert "apple-m4" in capsys.readouterr().err
    assert cli.run(["simulate", "--profile", "apple-m4", "--model", "8b", "--policy", "magic"]) == 2
    assert "known policies" in capsys.readouterr().err


def test_the_report_is_a_page_of_its_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    arguments = ["simulate", "--profile", "apple-a19-pro", "--model", "2b", "--draft", "300m", "--minutes", "1", "--warm", "2"]
    arguments += ["--policy", "fixed:3", "--policy", "adaptive+governor", "--out", str(tmp_path / "new" / "folder"), "--json"]
    assert cli.run(arguments) == 0
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)["policies"]) == {"fixed:3", "adaptive+governor"}
    (file,) = (tmp_path / "new" / "folder").iterdir()
    assert str(file) in printed.err
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "<script" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        ElementTree.fromstring(chart)
    assert "critical at 78" in charts[1]
    for words in ("after 2 minutes of full work", "avoided throttling", "best fixed length", "All figures are estimates", "J/token"):
        assert words in text


def test_warm_devices_start_slower_and_every_policy_reads_the_same_text() -> None:
    cold = scene("apple-a19-pro", "phone", "2b", "300m", minutes=1.0)
    warm = replace(cold, warm_minutes=5.0)
    rows = [compare(where, ("fixed:0", "fixed:3"))["fixed:3"] for where in (cold, warm)]
    assert rows[1]["tok_s_first_minute"] < 0.8 * rows[0]["tok_s_first_minute"]
    assert all(row["clock_share"] < 1.0 and row["npu_share"] == 0.0 for row in rows)
    histories = [where.run(where.policy("fixed:3")).history for where in (cold, warm)]
    assert all(a.kept == b.kept for a, b in zip(*histories, strict=False)), "heat changes the pace, not the text"
