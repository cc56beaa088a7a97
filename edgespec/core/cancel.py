"""A way to stop work from another thread, down to the inside of a device call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from edgespec.core.errors import Cancelled


class CancelToken:
    """Set once, from any thread. Engines that can interrupt a running device call `watch` it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may cancel while its own thread is in here
        self._event = threading.Event()
        self._watchers: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        with self._lock:
            self._event.set()
            watchers = tuple(self._watchers)
            for watcher in watchers:
                watcher()

    def check(self) -> None:
        """Raise Cancelled if the token is set."""
        if self._event.is_set():
            raise Cancelled("cancelled by the caller")

    def rest(self, seconds: float) -> None:
        """Sleep, but not longer than until the token is set."""
        self._event.wait(seconds)

    @contextmanager
    def watch(self, interrupt: Callable[[], None]) -> Generator[None]:
        """Call `interrupt` (from the cancelling thread) if the token is set while the block runs."""
        with self._lock:
            self._watchers.append(interrupt)
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._watchers.remove(interrupt)
