"""Where words go: answers to stdout, everything else to stderr, and how Ctrl-C reaches work that runs inside a device library."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

INTERRUPTED = 130
_POLL_S = 0.2  # a wait without a timeout cannot be interrupted on Windows
_CANCEL_S = 5.0  # a cancelled device call returns well within this
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline

_abandoned = threading.Event()


def say(text: str) -> None:
    """One line for the reader, on stderr."""
    print(text, file=sys.stderr, flush=True)


def paragraph(text: str, indent: int = 0) -> None:
    """On stdout, wrapped to the terminal's width with continued lines indented; in one line where no terminal shows it."""
    if sys.stdout.isatty():
        width = max(40, shutil.get_terminal_size().columns)
        text = textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    print(text)


def one_line(text: str) -> str:
    return " ".join(text.split())


def complain(text: str) -> None:
    say(f"edgespec: error: {safe(one_line(text))}")  # it may quote what a stranger's file holds


def write(text: str) -> None:
    """Part of an answer, on stdout at once. A terminal gets no control characters: a model must not steer it."""
    sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def safe(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def prefill_meter() -> Callable[[int, int], None] | None:
    """Shows on a terminal how much of a long prompt has been read; None elsewhere."""
    if not (sys.stderr.isatty() and sys.stdout.isatty()):
        return None

    def show(done: int, total: int) -> None:
        text = f"reading the prompt: {done} of {total} tokens" if done < total else ""
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    return show


@contextmanager
def progress_bar(title: str) -> Generator[Callable[[str, int, int], None]]:
    """A function of (stage, done, total) that shows how far work has come: bars on a terminal, else one line per stage, on stderr."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                say(f"{title}: {stage}")

        yield tell
        return

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(f"{title}: {stage}", total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield advance


def silence_stdout() -> None:
    """After the reader of a pipe has gone: let the interpreter's own flush at exit go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(code: int) -> None:
    """End the process. With a thread still inside a device call, skip the interpreter's teardown, which it would not survive."""
    if _abandoned.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def in_background(work: Callable[[], T], *, cancel: Callable[[], None] | None = None) -> T:
    """Run `work` on another thread, so that Ctrl-C is served at once while a device library is busy. Its exceptions pass through."""

    def once() -> Iterator[T]:
        yield work()

    [result] = each_in_background(once, cancel=cancel)
    return result


def each_in_background(work: Callable[[], Iterable[T]], *, cancel: Callable[[], None] | None = None) -> Generator[T]:
    """Iterate over `work()` on another thread, which runs ahead of the reader. `cancel` ends it when the reader leaves early."""
    done = object()
    items: queue.SimpleQueue[object] = queue.SimpleQueue()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            for item in work():
                items.put(item)
        except BaseException as error:
            failure.append(error)
        items.put(done)

    thread = threading.Thread(target=run, daemon=True, name="edgespec-work")
    thread.start()
    finished = False
    try:
        while not finished:
            try:
                item = items.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            finished = item is done
            if not finished:
                yield item  # pyright: ignore[reportReturnType]  # all but `done` come from `work`
        thread.join()
        if failure:
            raise failure[0]
    finally:
        if thread.is_alive() and cancel:
            cancel()
            thread.join(_CANCEL_S)
        if thread.is_alive():
            _abandoned.set()


@contextmanager
def ctrl_c(cancel: Callable[[], None]) -> Generator[None]:
    """While the block runs, the first Ctrl-C calls `cancel`, the second raises KeyboardInterrupt."""

    def handle(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        cancel()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
