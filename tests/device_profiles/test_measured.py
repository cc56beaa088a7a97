from __future__ import annotations

import tomllib

import pytest

from edgespec.core.device import UnitProfile
from edgespec.core.errors import ArtifactError
from edgespec_device_profiles.measured import SCHEMA, Answer, DraftCost, Machine, parse, to_toml
from tests.helpers.timed import example


def test_what_is_written_is_read_again() -> None:
    machine = Machine(name="x", processor='Quote " back\\slash \x7f \x01 größe 🙂', cores=2, memory_bytes=8)
    cold = Answer(at_s=1.5, kind="code edit", mode="plain", tok_s=2.0, thermal="fair", temperature_c=-4.0)
    measured = example(machine=machine, sustained=(cold,), overlap_penalty=1.25, energy_mj_per_token={"plain": 3.0})
    assert parse(to_toml(measured), origin="f") == measured


def test_a_profile_of_nothing_is_read_again() -> None:
    empty = example(units={}, kinds={}, sustained=(), complete=False, not_measured={})
    assert parse(to_toml(empty), origin="f") == empty
    assert not empty.usable and empty.pass_ms(1, 0) is None and empty.round_ms(2, 0, 1) is None


def test_the_runtime_gets_the_figures_and_where_they_come_from() -> None:
    device = example().device()
    assert device.provenance == "measured on 2026-01-02 with tiny on toy"
    assert device.units["cpu"].forward_ms[4] == {64: 13.0, 512: 26.0}
    assert device.chip == "Toy"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (f'schema = "{SCHEMA}"', 'schema = "edgespec.profile/9"', "this version reads 'edgespec.profile/1'"),
        ('policy = "adaptive"', 'policy = "adaptive"\nsurprise = 1', r"unknown entries \['surprise'\]"),
        ('date = "2026-01-02T03:04:05+00:00"', "", r"missing entries \['date'\]"),
        ("complete = true", "complete = 1", "complete is 1, expected bool"),
        ("cores = 2", "cores = true", "cores is True, expected int"),
        ("64 = 10.0", "64 = 0.0", "times > 0"),
        ("64 = 10.0", "64 = inf", "is inf, expected a number"),
        ("64 = 10.0", "short = 10.0", "entry 'short', expected whole numbers"),
        ("other_ms = 0.0", 'other_ms = "0"', "other_ms is '0', expected a number"),
        ("kept = [5, 1, 0, 0, 0, 0, 0]", "kept = [5]", "7 tested and 1 kept"),
        ("complete = true", "complete =", "not valid TOML"),
        ("complete = true", "complete = " + "[" * 10_000, "not valid TOML"),
        ("cores = 2", "cores = " + "1" * 5000, "not valid TOML"),
        ("bandwidth_gbs = 20.0", "bandwidth_gbs = 1" + "0" * 400, "expected a number"),
        ("64 = 10.0\n512 = 20.0", "", "each with times"),
    ],
)
def test_a_damaged_file_says_where_and_what_was_expected(old: str, new: str, says: str) -> None:
    with pytest.raises(ArtifactError, match=says) as error:
        parse(to_toml(example()).replace(old, new, 1), origin="some.toml")
    assert "some.toml" in str(error.value)


def test_the_file_is_toml_with_sections_people_can_find() -> None:
    table = tomllib.loads(to_toml(example()))
    assert table["units"]["cpu"]["forward_ms"]["1"]["64"] == 10.0
    assert table["not_measured"] == {"energy": "no meter"}


def test_times_between_measured_widths_and_contexts() -> None:
    measured = example()
    assert measured.pass_ms(3, 64) == pytest.approx(12.0)  # between 2 and 4 rows
    assert measured.pass_ms(1, 288) == pytest.approx(15.0)  # between 64 and 512 tokens
    assert measured.pass_ms(1, 5000) == measured.pass_ms(1, 512)
    assert measured.pass_ms(10, 64) == pytest.approx(19.0)  # along the last slope


def test_a_round_is_pass_draft_and_the_rest() -> None:
    measured = example(other_ms=0.5)
    assert measured.round_ms(1, 64, 0) == pytest.approx(10.5)
    costly = example(other_ms=0.5, draft=DraftCost(name="small", ms_per_token=2.0, miss_ms=0.25))
    assert costly.round_ms(4, 64, 3) == pytest.approx(13 + 6 + 0.5)
    assert costly.round_ms(1, 64, 0) == pytest.approx(10 + 0.25 + 0.5)


def test_one_width_alone_is_no_cost_curve() -> None:
    assert not example(units={"cpu": UnitProfile(forward_ms={1: {64: 1.0}})}).usable
    assert not example(units={"cpu": UnitProfile(forward_ms={2: {64: 1.0}, 3: {64: 1.0}})}).usable
