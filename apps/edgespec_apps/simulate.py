"""`edgespec simulate`: policies side by side on a device that is not here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps.console import paragraph
from edgespec_apps.options import AsJson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgespec_apps.simulation import Scene
    from edgespec_apps.texts import Text
    from edgespec_device_profiles.layout import Finding

SCHEMA = "edgespec.simulate/1"


def simulate(
    profile: Annotated[str, typer.Option("--profile", help="Chip file, such as apple-m4 or snapdragon-8-elite.", metavar="CHIP")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Installed package, or a name that states its size, such as 7b.", metavar="NAME")
    ],
    draft: Annotated[
        str,
        typer.Option("--draft", "-d", help="The same for the draft, beside which n-grams guess too; ngram: only they do.", metavar="NAME"),
    ] = "ngram",
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, metavar="M", help="How long, in virtual minutes.")] = 10.0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="One to compare; repeatable. NAME+governor adds the governor, which avoids heat; NAME@npu runs it all on the NPU (default:"
            " fixed:0 to fixed:8, adaptive and adaptive+governor).",
        ),
    ] = None,
    case: Annotated[
        str | None, typer.Option("--case", metavar="CASE", help="phone, fanless, fan or desktop (default: as the chip is sold).")
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option("--recording", metavar="FILE", help="Text to play, by `edgespec bench --record` (default: one that comes with this)."),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            "--acceptance",
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="Instead of a recorded text: every drafted token is right with this chance.",
        ),
    ] = None,
    warm: Annotated[float, typer.Option("--warm", min=0.0, metavar="M", help="Virtual minutes of full work before, not counted.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the order in which texts are played.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for a report with plots, in HTML.", file_okay=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare policies on a chip that is not here: tokens, heat and energy over time. All figures are estimates."""
    if acceptance is not None and recording is not None:
        raise ValueError("--acceptance and --recording are two texts; give one of them")
    from edgespec_apps import simulation, simulation_report
    from edgespec_apps.sizes import size_of
    from edgespec_device_profiles import cooling, history, registry

    chip = registry.load(profile)
    where = case or chip.cooling[0]
    scene = simulation.Scene(
        chip=chip,
        case=cooling.case(where),
        target=size_of(model),
        draft=None if draft == "ngram" else size_of(draft),
        text=_text(recording, acceptance, draft, seed),
        minutes=minutes,
        warm_minutes=warm,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    found = simulation.runs(scene, policy or simulation.DEFAULT_POLICIES)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "profile": chip.name,
        "minutes": minutes,
        "text": scene.text.title,
        "policies": {text: simulation.summary(*run) for text, run in found.items()},
        "fit_error": cooling.phone_fit_error(),
    }
    file = None
    if out is not None:
        file = out / f"simulate-{chip.name}-{where}.html"
        history.write_whole(file, simulation_report.page(scene, where, found, result["fit_error"]))
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        _print(result, scene, where, simulation_report.explain(found))
    if file is not None:
        print(f"Report: {file}", file=sys.stderr if as_json else sys.stdout)


def _text(file: Path | None, acceptance: float | None, draft: str, seed: int) -> Text:
    from edgespec.drafting.model import ModelDrafter
    from edgespec.drafting.ngram import NgramDrafter
    from edgespec_apps import recording, texts

    if acceptance is not None:
        return texts.Constant(acceptance, seed)
    drafters = (NgramDrafter.name,) if draft == "ngram" else (ModelDrafter.name, NgramDrafter.name)
    return texts.Recorded(recording.bundled() if file is None else recording.load(file), drafters, seed)


def _print(result: dict[str, Any], scene: Scene, where: str, findings: Sequence[Finding]) -> None:
    from edgespec_apps.simulation_report import CHANGES, title

    paragraph(f"{title(scene, where)}. All figures are estimates.")
    print(f"{'policy':<18}{'tokens':>8}{'first min':>10}{'last min':>9}{'peak °C':>8}{'J/token':>8}{'changes':>8}{'not kept':>9}")
    for name, row in result["policies"].items():
        print(
            f"{name:<18}{row['tokens']:>8}{row['tok_s_first_minute']:>10.1f}{row['tok_s_last_minute']:>9.1f}{row['peak_c']:>8.1f}"
            f"{row['energy_j'] / max(1, row['tokens']):>8.3f}{row['plan_flips']:>8}{row['wasted_drafts']:>9}"
        )
    for finding in findings:
        paragraph(f"- {finding}", 2)
    paragraph(f"First and last min: tokens/s in them, or in the halves of a shorter run. {CHANGES}")
    paragraph(f"Case: {scene.case.source}.")
    paragraph(f"{scene.text.note} Every policy reads the same text.")
    _print_fit(where)


def _print_fit(where: str) -> None:
    """How well the published phone runs are met. Other cases take from them only how power follows from speed."""
    from edgespec_device_profiles import cooling

    if where != "phone":
        paragraph(f"How speed follows from power is fitted to published runs of a phone, met within {cooling.phone_fit_error():.1%}.")
        return
    paragraph("Fit of the phone case to published runs (tokens/s at 10 min over the first; seconds to lose a tenth):")
    for name, end, published, onset_s, published_s in cooling.phone_fit():
        print(f"  {name:<28} {end:.2f} (published {published:.2f}), {onset_s:.0f} s (published {published_s:.0f} s)")
