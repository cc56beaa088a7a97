"""`edgespec profile`: measure this machine with a model, keep the figures, and say which draft length is best."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps import machine
from edgespec_apps.bench import encode
from edgespec_apps.console import INTERRUPTED, ctrl_c, in_background, paragraph, progress_bar, say
from edgespec_apps.measure import KINDS, load_prompts
from edgespec_apps.options import AsJson, ModelOptions

if TYPE_CHECKING:
    from edgespec.orchestrator.runtime import Runtime
    from edgespec_device_profiles.measure import Settings
    from edgespec_device_profiles.measured import Machine, Measured

SCHEMA = "edgespec.profile/1"
COMPARE_SCHEMA = "edgespec.profile-compare/1"
MINUTES, QUICK_MINUTES = 10.0, 1.5
QUICK_TOKENS, TOKENS = 48, 96


def profile(
    model: ModelOptions,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, metavar="M", help=f"How long to measure, about (default: {MINUTES:g}).")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"A rougher profile: shorter contexts and answers, {QUICK_MINUTES:g} minutes unless told.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for profiles and reports.", show_default="the store's profiles/")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Measure nothing; compare two profile files and write a report on both."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine with a model and its draft: costs, acceptance, speed over time.

    Writes a profile, which later runs on this machine use, and a report with plots beside it. Ctrl-C ends early and keeps what
    was measured.
    """
    if compare is not None:
        if minutes is not None or quick:
            raise ValueError("--compare measures nothing, so --minutes and --quick say nothing to it; leave them out")
        _compare(compare[0], compare[1], out, as_json=as_json)
        return
    folder = out if out is not None else profiles_folder()
    folder.mkdir(parents=True, exist_ok=True)  # now rather than after minutes of work
    measured, interrupted = _measure(model, minutes or (QUICK_MINUTES if quick else MINUTES), quick=quick)
    files: dict[str, str] = {}
    try:
        _write(measured, folder, files)
    finally:  # a full disk does not take minutes of work with it
        if as_json:
            print(json.dumps(summary(measured) | {"files": files}), flush=True)
        else:
            _print(measured, files)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def profiles_folder() -> Path:
    from edgespec.orchestrator.store import home

    return home() / "profiles"


def this_machine() -> Machine:
    """As profiles name it."""
    from edgespec_device_profiles.history import machine_name
    from edgespec_device_profiles.measured import Machine

    about = machine.describe()
    return Machine(
        name=machine_name(about["processor"], about["physical_cores"]),
        processor=about["processor"],
        system=about["system"],
        cores=about["physical_cores"],
        memory_bytes=about["memory_bytes"],
        load_before=about["load_average"][0],
    )


def settings(model: ModelOptions, minutes: float, *, quick: bool) -> Settings:
    from edgespec_device_profiles.measure import CONTEXTS, QUICK_CONTEXTS, Settings

    return Settings(
        seconds=minutes * 60,
        contexts=QUICK_CONTEXTS if quick else CONTEXTS,
        max_tokens=QUICK_TOKENS if quick else TOKENS,
        policy=model.policy,
        verify=model.verify.value,
        knobs=model.knobs(),
        max_context=model.max_context,
    )


def _measure(model: ModelOptions, minutes: float, *, quick: bool) -> tuple[Measured, bool]:
    """What was measured, and whether Ctrl-C ended it."""
    from edgespec.core.cancel import CancelToken
    from edgespec_device_profiles.measure import Profiler

    here = this_machine()  # before the model loads: its load is not the machine's
    threads = model.threads or machine.cores()
    cancel = CancelToken()
    with model.load() as runtime, progress_bar("profiling") as advance, ctrl_c(cancel.cancel):
        profiler = Profiler(
            runtime,
            _prompts(runtime, model.max_context or runtime.spec.max_context),
            machine=here,
            settings=settings(model, minutes, quick=quick),
            bandwidth=lambda: machine.bandwidth_gbs(threads=threads),
            others=_others(model, runtime),
            cancel=cancel,
            progress=advance,
        )
        measured = in_background(profiler.run, cancel=cancel.cancel)
    return measured, cancel.cancelled


def _others(model: ModelOptions, runtime: Runtime) -> Mapping[str, Callable[[], Runtime]]:
    """Loads the model on every other engine that can run one of its artifacts here."""
    import edgespec
    from edgespec.orchestrator import engines

    able = engines.able(runtime.manifest, model.recipe) if runtime.manifest else ()
    return {
        name: partial(edgespec.load, model.model, engine=name, recipe=model.recipe, draft="none", threads=model.threads)
        for name in able
        if name != runtime.engine_name
    }


def _prompts(runtime: Runtime, max_context: int) -> Mapping[str, Sequence[Sequence[int]]]:
    """The bench's prompts as token ids, by kind; those that leave no room for an answer are left out."""
    found: dict[str, list[Sequence[int]]] = {}
    for prompt in load_prompts(KINDS):
        ids = encode(runtime, prompt.text)
        if len(ids) <= max_context - TOKENS:
            found.setdefault(prompt.kind, []).append(ids)
    if not found:
        raise ValueError(f"a context of {max_context} tokens is too short for the profile's prompts")
    return found


def _write(measured: Measured, folder: Path, files: dict[str, str]) -> None:
    """Adds to `files` what is written."""
    from edgespec_device_profiles import history, report

    file = history.save(measured, folder)
    files["profile"] = str(file)
    page = file.with_suffix(".html")
    history.write_whole(page, report.page(measured))
    files["report"] = str(page)


def summary(measured: Measured) -> dict[str, Any]:
    """The JSON line: the profile's own figures, and what follows from them by kind of text."""
    from edgespec_device_profiles.measured import to_table
    from edgespec_device_profiles.verdict import drift, one_for_all, verdicts

    overall = one_for_all(measured)
    change = drift(measured, "plain")
    return to_table(measured) | {
        "schema": SCHEMA,
        "best": {
            v.kind: {"draft_tokens": v.draft_tokens, "expected": v.expected, "measured": v.measured, "few_rounds": v.thin}
            for v in verdicts(measured)
        },
        "best_for_all": {"draft_tokens": overall.draft_tokens, "expected": overall.speed_up} if overall else None,
        "plain_change": change.change if change else None,
    }


def _print(measured: Measured, files: Mapping[str, str]) -> None:
    from edgespec_device_profiles.verdict import overall, verdicts, warnings

    paragraph(overall(measured) or "Too little was measured to recommend a draft length.")
    for v in verdicts(measured):
        paragraph(f"  {v.finding(measured.policy)}", 4)
    for warning in warnings(measured):
        paragraph(f"Note: {warning}")
    if measured.model.placement is not None:
        paragraph(f"Where the work runs: {measured.model.placement.describe()}")
    for what, why in measured.not_measured.items():
        say(f"not measured: {what} ({why})")
    for what, file in files.items():
        print(f"{what.capitalize() + ':':<9}{file}")


def _compare(a: Path, b: Path, out: Path | None, *, as_json: bool) -> None:
    from edgespec_device_profiles import history, report

    first, second = history.load(a), history.load(b)
    rows = report.differences(first, second)
    folder = out if out is not None else b.parent
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{b.stem}-against-{a.stem}.html"
    history.write_whole(page, report.comparison(first, second))
    if as_json:
        differences = [{"what": what, "a": x, "b": y} for what, x, y in rows]
        print(json.dumps({"schema": COMPARE_SCHEMA, "a": str(a), "b": str(b), "differences": differences, "report": str(page)}), flush=True)
        return
    width = max((len(what) for what, _, _ in rows), default=0)
    print(f"{'':<{width}}{'A':>12}{'B':>12}{'B / A':>9}")
    for what, x, y in rows:
        print(f"{what:<{width}}{x:>12.4g}{y:>12.4g}{f'{y / x:.2f}' if x else '-':>9}")
    print(f"Report: {page}")
