from __future__ import annotations

import pytest

from edgespec.core.engine import ModelSpec
from edgespec_device_profiles import estimates, registry
from edgespec_device_profiles.priors import ROWS, prior, size_of

SPEC = ModelSpec(
    name="coder-1.5b",
    vocab_size=151_936,
    vocab_digest="",
    max_context=4096,
    layers=28,
    hidden=1536,
    weight_bytes=870_000_000,
    kv_bytes_per_token=57_344,
)


@pytest.mark.parametrize("name", registry.names())
def test_every_chip_gives_a_prior_that_says_what_it_is(name: str) -> None:
    chip = registry.load(name)
    for unit in estimates.units(chip):
        profile = prior(chip, SPEC, unit)
        assert profile.estimated and profile.overlap_penalty is None
        assert "estimates" in profile.provenance and name in profile.provenance and SPEC.name in profile.provenance
        assert [known for known, rated in profile.units.items() if rated.forward_ms] == [unit]
        assert profile.units["gpu"].bandwidth_gbs == estimates.bandwidth_gbs(chip, "gpu")
        for context in (128, 512, 2048):
            ms = [profile.units[unit].forward_ms[rows][context] for rows in ROWS]
            assert all(a <= b <= rows * ms[0] for a, b, rows in zip(ms, ms[1:], ROWS[1:], strict=False))


def test_the_models_own_bytes_decide() -> None:
    chip = registry.load("apple-m4")
    table = prior(chip, SPEC, "gpu").units["gpu"].forward_ms
    assert table[8][512] == estimates.pass_ms(chip, "gpu", size_of(SPEC), rows=8, context=512)
    assert table[1][128] > 870e6 / (estimates.bandwidth_gbs(chip, "gpu") * 1e9) * 1e3  # all weights are read
    assert table[1][2048] > table[1][128]


def test_the_count_of_weights_is_within_a_third() -> None:
    assert size_of(SPEC).parameters == pytest.approx(1.54e9, rel=0.34)


def test_watts_are_the_chip_files_or_none() -> None:
    units = prior(registry.load("apple-m4"), SPEC, "cpu").units
    assert units["npu"].busy_w == 2.8 and units["gpu"].busy_w is None


def test_a_short_context_is_enough() -> None:
    short = ModelSpec(**{name: getattr(SPEC, name) for name in SPEC.__slots__} | {"max_context": 64})
    assert set(prior(registry.load("apple-m4"), short, "cpu").units["cpu"].forward_ms[1]) == {64}


def test_what_two_units_cost_each_other_is_never_estimated() -> None:
    assert registry.load("apple-m5-pro").value("overlap_penalty") is not None
    assert prior(registry.load("apple-m5-pro"), SPEC, "gpu").overlap_penalty is None
