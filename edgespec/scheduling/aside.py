"""A call that may hang, made where it hangs nobody."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """Calls one function on a daemon thread of its own, which ends when this object is dropped.

    What this cannot help with: a C library that hangs without releasing Python's global lock stops every thread.
    """

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        self._requests: SimpleQueue[Future[T] | None] = SimpleQueue()
        self._latest: Future[T] | None = None
        self._lock = threading.Lock()
        threading.Thread(target=_serve, args=(function, self._requests), name=name, daemon=True).start()
        weakref.finalize(self, self._requests.put, None)

    @property
    def busy(self) -> bool:
        """Whether a call is still out."""
        return self._latest is not None and not self._latest.done()

    def call(self, wait_s: float) -> T:
        """What the function returns or raises. TimeoutError after `wait_s`, and at once while an earlier call is still out."""
        with self._lock:
            if self.busy:
                raise TimeoutError("an earlier call has not come back yet")
            self._latest = Future()
            self._requests.put(self._latest)
            try:
                return self._latest.result(wait_s)
            except TimeoutError as error:
                raise TimeoutError(str(error) or f"no answer within {wait_s:g} s") from error


def _serve(function: Callable[[], T], requests: SimpleQueue[Future[T] | None]) -> None:
    while (request := requests.get()) is not None:
        try:
            request.set_result(function())
        except Exception as error:
            request.set_exception(error)
        except BaseException as error:  # some libraries' panics; the caller guards against exceptions only
            request.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
