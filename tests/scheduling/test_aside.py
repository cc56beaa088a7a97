from __future__ import annotations

import gc
import threading

import pytest

from edgespec.scheduling.aside import Aside


def test_it_hands_on_what_the_function_returns_and_raises_from_one_thread_of_its_own() -> None:
    threads: list[threading.Thread] = []

    def function() -> int:
        threads.append(threading.current_thread())
        if len(threads) == 2:
            raise ZeroDivisionError("second")
        return len(threads)

    aside = Aside(function, name="aside-test")
    assert aside.call(5) == 1
    with pytest.raises(ZeroDivisionError, match="second"):
        aside.call(5)
    assert aside.call(5) == 3
    assert {thread.name for thread in threads} == {"aside-test"} and len(set(threads)) == 1
    assert threads[0].daemon  # a call that hangs must not keep the program from ending


def test_a_call_that_hangs_is_waited_for_once_and_works_again_when_it_comes_back() -> None:
    released, began, calls = threading.Event(), threading.Event(), list[int]()

    def function() -> int:
        calls.append(len(calls))
        began.set()
        if calls == [0]:
            released.wait(30)
        return calls[-1]

    aside = Aside(function, name="aside-test")
    with pytest.raises(TimeoutError, match=r"no answer within 0\.001 s"):
        aside.call(0.001)
    assert began.wait(5)
    with pytest.raises(TimeoutError, match="earlier call"):
        aside.call(30)  # at once, or this test would take half a minute
    assert calls == [0]
    released.set()
    while aside.busy:
        threading.Event().wait(0.001)
    assert aside.call(5) == 1  # the late answer 0 is nobody's


def test_a_librarys_panic_is_an_ordinary_exception() -> None:
    class Panic(BaseException):
        pass

    def function() -> None:
        raise Panic("at the disco")

    with pytest.raises(RuntimeError, match="Panic: at the disco"):
        Aside(function, name="aside-test").call(5)


def test_the_thread_ends_with_the_object() -> None:
    threads: list[threading.Thread] = []
    aside = Aside(lambda: threads.append(threading.current_thread()), name="aside-test")
    aside.call(5)
    del aside
    gc.collect()
    threads[0].join(5)
    assert not threads[0].is_alive()
