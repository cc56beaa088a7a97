from __future__ import annotations

import pytest

from edgespec.scheduling.readings import Reading, hottest, library


@pytest.mark.parametrize(
    "values",
    [{"battery": float("nan")}, {"battery": -0.01}, {"battery": 1.01}, {"temperature_c": float("nan")}, {"temperature_c": float("inf")}],
)
def test_a_reading_holds_only_what_can_be(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got"):
        Reading(**values)  # type: ignore[arg-type]
    assert Reading(battery=0.0, temperature_c=-5.0).battery == 0.0


def test_the_hottest_of_no_words_is_unknown() -> None:
    assert hottest([]) is None
    assert hottest(["fair", "serious", "nominal"]) == "serious"


def test_a_missing_library_is_named_with_its_package() -> None:
    with pytest.raises(ImportError, match="heat-reader is not installed; pip install heat-reader"):
        library("no_such_module_heat", "heat-reader")
    assert library("math", "none").pi > 3
