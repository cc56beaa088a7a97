from __future__ import annotations

import threading
from typing import Any

import pytest

from edgespec.scheduling import meters
from edgespec.scheduling.meters import GuardedMeter, default_meter, try_meters


class Scripted:
    """A meter that gives one answer after the other, then the last again and again."""

    name = "scripted"

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def total_mj(self) -> float:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def totals(meter: GuardedMeter, times: int) -> list[float]:
    return [meter.total_mj() for _ in range(times)]


def test_it_counts_from_its_own_beginning() -> None:
    assert totals(GuardedMeter(Scripted(1000, 1000, 1250, 1300)), 3) == [0, 250, 300]


@pytest.mark.parametrize("failure", [OSError("gone"), float("nan"), float("inf"), None, "much"], ids=repr)
def test_a_failure_repeats_the_last_total_and_loses_nothing(failure: Any, caplog: pytest.LogCaptureFixture) -> None:
    meter = GuardedMeter(Scripted(0.0, 40.0, failure, failure, 100.0, failure))
    assert totals(meter, 3) == [40, 40, 40]
    assert meter.failure is not None
    assert meter.total_mj() == 100  # with what was used meanwhile
    assert meter.failure is None
    assert meter.total_mj() == 100
    assert len(caplog.records) == 1 and "scripted" in caplog.records[0].message  # said once, not every round


def test_a_counter_that_begins_anew_never_makes_the_total_fall(caplog: pytest.LogCaptureFixture) -> None:
    meter = GuardedMeter(Scripted(500.0, 900.0, 20.0, 50.0, 49.0, 60.0))
    assert totals(meter, 5) == [400, 400, 430, 430, 441]
    assert len(caplog.records) == 1 and "ran backwards from 900 to 20 mJ" in caplog.records[0].message


def test_a_panic_stops_nobody() -> None:
    class Panic(BaseException):
        pass

    assert totals(GuardedMeter(Scripted(0.0, Panic("!"), 5.0)), 2) == [0, 5]


def test_a_meter_that_hangs_costs_one_short_wait() -> None:
    released, reads = threading.Event(), list[int]()

    class Hanging:
        name = "hanging"

        def total_mj(self) -> float:
            reads.append(len(reads))
            if len(reads) == 2:
                released.wait(30)
            return 10.0 * len(reads)

    meter = GuardedMeter(Hanging(), wait_s=0.001)
    assert totals(meter, 50) == [0] * 50
    assert reads == [0, 1]  # the hanging call is not joined by more of them
    assert meter.failure == "TimeoutError: an earlier call has not come back yet"
    released.set()
    while meter.failure is not None:
        meter.total_mj()
    assert meter.total_mj() > 0


@pytest.mark.parametrize("first", [OSError("no counter"), float("nan")], ids=repr)
def test_a_meter_that_never_worked_is_no_meter(first: Any) -> None:
    with pytest.raises((OSError, ValueError)):
        GuardedMeter(Scripted(first))


class Broken:
    name = "broken"

    def __init__(self) -> None:
        raise RuntimeError("Failed to create a subscription.")


class Numberless(Scripted):
    name = "numberless"

    def __init__(self) -> None:
        super().__init__(float("nan"))


class Working(Scripted):
    name = "working"

    def __init__(self) -> None:
        super().__init__(5.0, 7.0)


def test_the_first_that_works_is_the_meter_and_the_others_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(meters.MAKERS, "Toaster", (Broken, Numberless, Working))
    found = try_meters("Toaster")
    assert list(found) == ["broken", "numberless", "working"]
    assert found["broken"] == "RuntimeError: Failed to create a subscription."
    assert found["numberless"] == "ValueError: a meter's total is a finite number, got nan"
    assert isinstance(found["working"], GuardedMeter)
    total_mj = default_meter("Toaster")
    assert total_mj is not None and total_mj() == 2.0


def test_without_a_meter_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(meters.MAKERS, "Toaster", (Broken,))
    assert default_meter("Toaster") is None
    assert default_meter("Plan 9") is None and try_meters("Plan 9") == {}


def test_every_system_has_its_meters_in_order() -> None:
    assert list(try_meters("Darwin")) == ["zeus-apple-silicon", "macmon-lib"]
    assert list(try_meters("Linux")) == ["rapl"]
