"""The `edgespec` command: which commands there are, and how every error becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec_apps.bench import bench
from edgespec_apps.chat import chat
from edgespec_apps.console import INTERRUPTED, complain, leave
from edgespec_apps.doctor import doctor
from edgespec_apps.generate import generate
from edgespec_apps.models import convert, models, pull
from edgespec_apps.options import Debug, Settings, grouped
from edgespec_apps.plan import plan
from edgespec_apps.profile import profile
from edgespec_apps.simulate import simulate

if TYPE_CHECKING:
    from edgespec.orchestrator.store import NotInstalled

OK, FAILED, USAGE = 0, 1, 2

app = typer.Typer(
    name="edgespec",
    help="Exact speculative decoding for language models on your own device: faster answers, never a changed one.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import edgespec

        print(edgespec.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
    debug: Debug = False,
) -> None:
    """Options before the command."""


for command in (chat, generate, pull, convert, models, bench, profile, plan, simulate, doctor):
    app.command()(grouped(command))


def run(arguments: Sequence[str]) -> int:
    """The exit code: 0 done, 1 a clear error on stderr, 2 wrong usage, 130 interrupted."""
    settings = Settings()
    command = typer.main.get_command(app)
    try:
        code = command.main(args=list(arguments) or ["--help"], prog_name="edgespec", standalone_mode=False, obj=settings)
        return USAGE if not arguments else code if isinstance(code, int) else OK
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if settings.debug:
            traceback.print_exc()
        complain(describe(error) + hint(error))
        return exit_code(error)


def describe(error: Exception) -> str:
    """What the user reads. Errors that nobody foresaw say so."""
    from edgespec.core.errors import EdgespecError
    from edgespec.orchestrator.store import NotInstalled

    if isinstance(error, NotInstalled):
        return _not_installed(error)
    usage = getattr(error, "format_message", None)  # typer's own errors; its versions keep their class in different places
    if usage is not None:
        return str(usage())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, EdgespecError | ValueError | OSError) and str(error):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory; close other programs, or take a smaller model, recipe or --max-context"
    return f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)"


def _not_installed(error: NotInstalled) -> str:
    """With the nearest name among the installed models and those that can be pulled."""
    from edgespec_converters.registry import entries

    known = [entry.name for entry in entries()]
    near = difflib.get_close_matches(error.name.lower(), [*error.installed, *known], n=1)
    if error.name in known or not near:
        return str(error)
    return f"{error.what}; did you mean {near[0]}?" + ("" if near[0] in error.installed else f" Get it: edgespec pull {near[0]}")


def hint(error: Exception) -> str:
    """What to do about mistakes that the parser only names."""
    context = getattr(error, "ctx", None)
    asked_twice = context is not None and context.info_name == "generate" and "unexpected extra argument" in describe(error)
    return '; put the whole prompt in quotes: edgespec generate "hello world"' if asked_twice else ""


def exit_code(error: Exception) -> int:
    return USAGE if isinstance(error, ValueError) or hasattr(error, "format_message") else FAILED


def main() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # started with that stream closed
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    code = run(sys.argv[1:])
    with contextlib.suppress(BrokenPipeError):
        leave(code)


if __name__ == "__main__":
    main()
