from __future__ import annotations

import pytest

from edgespec.core.trace import RoundTrace
from edgespec.scheduling.folding import HistoryFold
from tests.helpers.rounds import made_round


def test_an_interrupt_in_the_middle_leaves_nothing_counted_twice() -> None:
    """States are changed in place, so a round may be half learnt when Ctrl-C comes."""
    interrupts = [3, 7, 7]

    def step(seen: list[int], trace: RoundTrace) -> list[int]:
        seen.append(trace.round)
        if interrupts and interrupts[0] == trace.round:
            interrupts.pop(0)
            raise KeyboardInterrupt
        return seen

    fold, history = HistoryFold[list[int]](list, step), list[RoundTrace]()
    for i in range(10):
        history.append(made_round(i))
        while i in interrupts:
            with pytest.raises(KeyboardInterrupt):
                fold(history)
        assert fold(history) == list(range(i + 1))
