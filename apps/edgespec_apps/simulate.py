"""`edgespec simulate`: policies side by side on a device that is not here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps.options import AsJson

if TYPE_CHECKING:
    from edgespec_apps.simulation import Scene
    from edgespec_apps.texts import Text

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
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="Virtual time.")] = 10.0,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Repeatable; add +governor to put the governor around it. Default: fixed:0 to 8 and adaptive."),
    ] = None,
    case: Annotated[str | None, typer.Option("--case", help="phone, fanless, fan or desktop (default: as the chip is sold).")] = None,
    recording: Annotated[
        Path | None,
        typer.Option("--recording", metavar="FILE", help="Text to play, by `edgespec bench --record` (default: one that comes with this)."),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option("--acceptance", min=0.0, max=1.0, help="Instead of a recorded text: this chance for every drafted token."),
    ] = None,
    warm: Annotated[float, typer.Option("--warm", min=0.0, help="Virtual minutes of full work before, not counted.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for a report in HTML.", file_okay=False)] = None,
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
    gains = simulation_report.explain(found)
    if out is not None:
        file = out / f"simulate-{chip.name}-{where}.html"
        history.write_whole(file, simulation_report.page(scene, found, result["fit_error"]))
        print(f"Report: {file}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        _print(result, scene)
        print("\n".join(gains))


def _text(file: Path | None, acceptance: float | None, draft: str, seed: int) -> Text:
    from edgespec.drafting.model import ModelDrafter
    from edgespec.drafting.ngram import NgramDrafter
    from edgespec_apps import recording, texts

    if acceptance is not None:
        return texts.Constant(acceptance, seed)
    drafters = (NgramDrafter.name,) if draft == "ngram" else (ModelDrafter.name, NgramDrafter.name)
    return texts.Recorded(recording.bundled() if file is None else recording.load(file), drafters, seed)


def _print(result: dict[str, Any], scene: Scene) -> None:
    from edgespec_device_profiles import cooling

    minutes = "1 virtual minute" if result["minutes"] == 1 else f"{result['minutes']:g} virtual minutes"
    print(f"{scene.chip.chip}, {minutes}. Estimates; case: {scene.case.source}.")
    print(f"{scene.text.note} Every policy reads the same text.")
    print("Tokens/s over the first and the last minute (short runs: half); guesses not kept. Changes: another draft length or drafter than")
    print("when the same was last on offer, one-round looks aside and drafts that an offer or the answer's end cuts short left out.")
    print(f"{'policy':<20}{'tokens':>9}{'first min':>11}{'last min':>10}{'peak °C':>9}{'J/token':>9}{'changes':>9}{'not kept':>10}")
    for name, row in result["policies"].items():
        print(
            f"{name:<20}{row['tokens']:>9}{row['tok_s_first_minute']:>11.1f}{row['tok_s_last_minute']:>10.1f}{row['peak_c']:>9.1f}"
            f"{row['energy_j'] / max(1, row['tokens']):>9.3f}{row['plan_flips']:>9}{row['wasted_drafts']:>10}"
        )
    print("Fit of the phone case to published runs (tokens/s at 10 min over the first; seconds to lose a tenth):")
    for name, end, published, onset_s, published_s in cooling.phone_fit():
        print(f"  {name:<28} {end:.2f} (published {published:.2f}), {onset_s:.0f} s (published {published_s:.0f} s)")
