"""However an answer ends, its session stays usable and can be closed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any

import numpy as np
import pytest

from edgespec.core.cancel import CancelToken
from edgespec.core.errors import CapabilityError, DeviceError
from edgespec.core.sampling import Sampling
from edgespec.orchestrator import session as session_module
from edgespec.orchestrator.session import Session
from tests.helpers.toys import toy_draft, toy_lm
from tests.helpers.toytext import toy_runtime

PROMPT = [0, 1, 2, 3, 4, 5, 6, 7]


def in_time(work: Callable[[], None]) -> bool:
    """Whether `work` ends at all, on a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_closing_ends_an_answer_that_its_reader_left_standing() -> None:
    target = toy_lm(5)
    session = toy_runtime(target, draft="none").session()
    chunks = session.stream("abc", max_tokens=50)
    next(chunks)
    assert in_time(session.close)
    assert list(chunks) == []
    assert target.forwards == 2


def test_closing_while_another_thread_reads_the_answer() -> None:
    session = toy_runtime(toy_lm(5), draft="none").session()
    begun = threading.Event()
    tokens: list[int] = []

    def read() -> None:
        for chunk in session.stream("abc", max_tokens=4000):
            tokens.extend(chunk.token_ids)
            if len(tokens) >= 3:
                begun.set()
                sleep(0.001)  # a toy writes all it has before another thread gets its turn

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert begun.wait(20)
    assert in_time(session.close)
    reader.join(20)
    assert not reader.is_alive()
    assert len(tokens) < 4000


def test_a_session_is_free_again_after_its_reader_failed() -> None:
    session = toy_runtime(toy_lm(5), draft="none").session()
    with pytest.raises(RuntimeError), session:
        chunks = session.stream("abc", max_tokens=50)
        for _ in chunks:
            raise RuntimeError("the reader's own")


class _Interrupted(KeyboardInterrupt):
    pass


def interrupted_at(session: Session, line: int) -> bool:
    """Whether this line of the session's module was reached while it answered, and an interrupt raised before it."""
    reached = False

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal reached
        if frame.f_code.co_filename != session_module.__file__:
            return None
        if event == "line" and frame.f_lineno == line and not reached:
            reached = True
            raise _Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        session.generate(PROMPT, max_tokens=8)
    except _Interrupted:
        pass
    finally:
        sys.settrace(before)
    return reached


def interruptible_lines(function: Callable[..., object]) -> list[int]:
    """Lines at which Python serves signals: those that call something. None is served between taking and releasing what `with` holds,
    or between `finally` and the plain assignments behind it."""
    code = function.__code__  # type: ignore[attr-defined]
    text = Path(session_module.__file__).read_text(encoding="utf-8").splitlines()
    lines = sorted({line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno})
    silent = ("with ", "try", "finally", "if self._turn is turn", "self._turn = None")
    return [line for line in lines if not text[line - 1].strip().startswith(silent)]


@pytest.mark.parametrize("name", ["_answer", "_rewound_cache", "_parts", "_take"])
def test_an_interrupt_at_any_line_leaves_a_clean_session(name: str) -> None:
    function = getattr(Session, name)
    fresh = lambda prompt: toy_runtime(toy_lm(5), draft="none").session().generate(prompt, max_tokens=8).token_ids  # noqa: E731
    other = [*PROMPT[:3], 9, 9, 9, 9, 9, 9]
    reached = 0
    for line in interruptible_lines(function):
        session = toy_runtime(toy_lm(5), draft="itself", draft_engine=toy_draft(5)).session(policy="fixed:3")
        session.generate(other, max_tokens=8)
        reached += interrupted_at(session, line)
        assert session.generate(other, max_tokens=8).token_ids == fresh(other), line
        assert session.generate(PROMPT, max_tokens=8).token_ids == fresh(PROMPT), line
        assert in_time(session.close)
    assert reached > 1


def test_a_refused_second_answer_does_not_free_the_first_ones_session() -> None:
    session = toy_runtime(toy_lm(5), draft="none").session()
    first = session.stream("abc", max_tokens=9)
    next(first)
    for _ in range(2):
        with pytest.raises(CapabilityError, match="still answering"):
            session.generate("abc")
    assert len(list(first)) == 8


def test_a_signal_handler_may_cancel_wherever_its_thread_stands() -> None:
    """A handler runs between two lines of whatever its thread was doing; here: of the token's own methods."""
    for at in range(30):
        token, count = CancelToken(), 0

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal count
            if frame.f_code.co_filename.endswith("cancel.py") and event == "line":
                count += 1
                if count == at:  # noqa: B023
                    sys.settrace(None)
                    token.cancel()  # noqa: B023
            return trace

        def work() -> None:
            sys.settrace(trace)
            try:
                with token.watch(lambda: None):  # noqa: B023
                    pass
            except Exception:
                assert token.cancelled  # noqa: B023
            finally:
                sys.settrace(None)

        assert in_time(work)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(bias={3: 1.0}),
        Sampling(temperature=0.7),
        Sampling(temperature=0.7, min_p=0.1),
        Sampling(temperature=0.7, top_k=3),
        Sampling(temperature=0.7, top_p=0.5),
    ],
)
@pytest.mark.parametrize("damage", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_end_the_answer_with_a_clear_error(sampling: Sampling, damage: float) -> None:
    engine = toy_lm(5)
    good = engine.law
    engine.law = lambda tokens: good(tokens) if len(tokens) < 6 else np.full(16, damage, np.float32)
    session = toy_runtime(engine, draft="none").session()
    with pytest.raises(DeviceError, match="not numbers"):
        session.generate("abc", max_tokens=20, sampling=sampling)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=1, top_k=3), Sampling(temperature=0.7, seed=1, min_p=0.2)])
def test_a_damaged_draft_asked_for_its_entropy_changes_nothing(sampling: Sampling) -> None:
    draft = toy_draft(5)
    draft.law = lambda tokens: np.full(16, np.nan, np.float32)
    session = toy_runtime(toy_lm(5), draft="broken", draft_engine=draft).session(policy="entropy")
    plain = toy_runtime(toy_lm(5), draft="none").session().generate("abc", max_tokens=20, sampling=sampling)
    assert session.generate("abc", max_tokens=20, sampling=sampling).token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("bias", "message"),
    [({16: 1.0}, "bias needs token ids below 16"), ({token: float("-inf") for token in range(16)}, "forbids every token")],
)
def test_a_bias_that_could_not_act_is_refused(bias: dict[int, float], message: str) -> None:
    target = toy_lm(5)
    with pytest.raises(ValueError, match=message):
        toy_runtime(target).session().stream("abc", sampling=Sampling(bias=bias))
    assert target.forwards == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-40},
        {"temperature": 1e39},
        {"repetition_penalty": 1e-40},
        {"presence_penalty": 1e39},
        {"frequency_penalty": -1e39},
        {"bias": {3: 1e39}},
    ],
)
def test_options_that_would_carry_logits_out_of_their_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_extreme_options_still_have_a_law(temperature: float) -> None:
    sampling = Sampling(
        temperature=temperature, repetition_penalty=1e6, presence_penalty=-1e6, frequency_penalty=-1e6, bias={3: 1e30, 4: float("-inf")}
    )
    answer = toy_runtime(toy_lm(5)).session().generate("abc", max_tokens=9, sampling=sampling)
    assert answer.token_ids == (3,) * 9
