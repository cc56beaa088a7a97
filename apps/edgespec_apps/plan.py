"""`edgespec plan`: whether a model fits a device, and what to expect of it."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from edgespec_apps.options import AsJson
from edgespec_device_profiles.estimates import BITS


def plan(
    device: Annotated[str, typer.Option("--device", help="Chip file, such as apple-m4 or snapdragon-8-gen-3.", metavar="CHIP")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Installed package, or a name that states its size, such as 7b.", metavar="NAME")
    ],
    draft: Annotated[str | None, typer.Option("--draft", "-d", help="The same for a draft model.", metavar="NAME")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="Default: the most it is sold with.", metavar="4GB")] = None,
    watts: Annotated[float | None, typer.Option("--watts", min=0.1, help="Most that may be drawn.")] = None,
    cores: Annotated[int | None, typer.Option("--cores", min=1, help="Also estimate the CPU alone, on this many fast cores.")] = None,
    case: Annotated[str | None, typer.Option("--case", help="phone, fanless, fan or desktop (default: as the chip is sold).")] = None,
    bits: Annotated[float, typer.Option("--bits", min=1.0, max=32.0, help="Per weight, for models that are not installed.")] = BITS,
    acceptance: Annotated[float, typer.Option("--acceptance", min=0.0, max=1.0, help="Assumed per drafted token.")] = 0.75,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of one conversation.")] = 2048,
    as_json: AsJson = False,
) -> None:
    """Say whether a model fits a device and what to expect of it. Estimates, from published figures."""
    from edgespec_apps.planning import GB, Question, answer, bytes_from
    from edgespec_apps.sizes import size_of
    from edgespec_device_profiles import cooling, registry

    chip = registry.load(device)
    found = answer(
        Question(
            chip=chip,
            case=cooling.case(case or chip.cooling[0]),
            target=size_of(model, bits=bits),
            draft=size_of(draft, bits=bits) if draft else None,
            memory_bytes=bytes_from(memory) if memory else chip.figures["max_memory_gb"].value * GB,
            watts=watts,
            cores=cores,
            alpha=acceptance,
            context=context,
        )
    )
    if as_json:
        print(json.dumps(found), flush=True)
    else:
        _print(found, chip.chip)


def _print(found: dict[str, Any], chip: str) -> None:
    from edgespec_apps.planning import PROFILE

    memory, low_high = found["memory"], found["tok_s"]
    print(f"{found['model']} on {chip} (estimates)")
    verdict = "fits" if found["fits"] else "does not fit"
    print(
        f"  memory     {verdict}: weights {memory['weight_bytes'] / 1e9:.2f} GB, context {memory['kv_bytes'] / 1e9:.2f} GB, "
        f"available {memory['available_bytes'] / 1e9:.2f} GB"
    )
    print(f"  held back  by {found['bound_by']}, on the {found['unit'].upper()}")
    hypothetical = "" if found["fits"] else ", if it did fit"
    print(f"  speed      about {_speed(found | {'tok_s': math.sqrt(low_high[0] * low_high[1])})}{hypothetical}")
    if on_cores := found["on_cores"]:
        print(f"  CPU only   on {on_cores['cores']} cores about {_speed(on_cores)}{hypothetical}")
    if found["with_draft"]:
        draft = found["with_draft"]
        small = "" if draft["small_enough"] else "; it takes more than a tenth of the target's memory"
        print(
            f"  draft      {draft['draft']}: {draft['best_draft_length']} tokens a round give {draft['speed_up']:.2f} × "
            f"at an assumed acceptance of {draft['assumed_acceptance']:g}{small}"
        )
    for line in found["would_change"]:
        print(f"  note       {line}" if line.startswith(PROFILE) else f"  would help {line}")


def _speed(found: dict[str, Any]) -> str:
    from edgespec_apps.planning import SPREAD

    sustained, cold = found["tok_s"], found["tok_s_cold"]
    within = f"within {sustained / (1 + SPREAD):.1f}–{sustained * (1 + SPREAD):.1f}"
    return f"{sustained:.1f} tokens/s sustained ({within}; {cold:.1f} while cold), {found['joules_per_token']:.2f} J/token"
