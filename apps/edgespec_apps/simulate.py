"""`edgespec simulate`: policies side by side on a device that is not here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps.options import AsJson

if TYPE_CHECKING:
    from edgespec_apps.simulation import Scene

SCHEMA = "edgespec.simulate/1"


def simulate(
    profile: Annotated[str, typer.Option("--profile", help="Chip file, such as apple-m4 or snapdragon-8-elite.", metavar="CHIP")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Installed package, or a name that states its size, such as 7b.", metavar="NAME")
    ],
    draft: Annotated[
        str, typer.Option("--draft", "-d", help="The same for the draft; ngram guesses for nothing.", metavar="NAME")
    ] = "ngram",
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="Virtual time.")] = 10.0,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Repeatable; add +governor to put the governor around it. Default: fixed:0 to 8 and adaptive."),
    ] = None,
    case: Annotated[str | None, typer.Option("--case", help="phone, fanless, fan or desktop (default: as the chip is sold).")] = None,
    acceptance: Annotated[float, typer.Option("--acceptance", min=0.0, max=1.0, help="Assumed per drafted token.")] = 0.75,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare policies on a chip that is not here: tokens, heat and energy over time. All figures are estimates."""
    from edgespec_apps import simulation
    from edgespec_apps.sizes import size_of
    from edgespec_device_profiles import cooling, registry

    chip = registry.load(profile)
    scene = simulation.Scene(
        chip=chip,
        case=cooling.case(case or chip.cooling[0]),
        target=size_of(model),
        draft=None if draft == "ngram" else size_of(draft),
        alpha=acceptance,
        minutes=minutes,
        seed=seed,
    )
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "profile": chip.name,
        "minutes": minutes,
        "policies": simulation.compare(scene, policy or simulation.DEFAULT_POLICIES),
        "fit_error": cooling.phone_fit_error(),
    }
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        _print(result, scene)


def _print(result: dict[str, Any], scene: Scene) -> None:
    from edgespec_device_profiles import cooling

    print(f"{scene.chip.chip}, {result['minutes']:g} virtual minutes. Estimates; case: {scene.case.source}.")
    print(f"{'policy':<20}{'tokens':>9}{'first min':>11}{'last min':>10}{'peak °C':>9}{'J/token':>9}{'flips':>7}{'wasted':>9}")
    for name, row in result["policies"].items():
        print(
            f"{name:<20}{row['tokens']:>9}{row['tok_s_first_minute']:>11.1f}{row['tok_s_last_minute']:>10.1f}{row['peak_c']:>9.1f}"
            f"{row['energy_j'] / max(1, row['tokens']):>9.3f}{row['plan_flips']:>7}{row['wasted_drafts']:>9}"
        )
    print("Fit of the phone case to published runs (tokens/s at 10 min over the first; seconds to lose a tenth):")
    for name, end, published, onset_s, published_s in cooling.phone_fit():
        print(f"  {name:<28} {end:.2f} (published {published:.2f}), {onset_s:.0f} s (published {published_s:.0f} s)")
