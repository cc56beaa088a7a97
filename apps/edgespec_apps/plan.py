"""`edgespec plan`: whether a model fits a device, and what to expect of it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps.console import paragraph
from edgespec_apps.options import AsJson
from edgespec_device_profiles.estimates import BITS

if TYPE_CHECKING:
    from edgespec_apps.planning import Question


def plan(
    device: Annotated[str, typer.Option("--device", help="Chip file, such as apple-m4 or snapdragon-8-gen-3.", metavar="CHIP")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Installed package, or a name that states its size, such as 7b.", metavar="NAME")
    ],
    draft: Annotated[str | None, typer.Option("--draft", "-d", help="The same for a draft model.", metavar="NAME")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Of the device, such as 4GB (default: the most it is sold with).", metavar="SIZE")
    ] = None,
    watts: Annotated[float | None, typer.Option("--watts", min=0.1, metavar="W", help="Most power that may be drawn.")] = None,
    cores: Annotated[
        int | None, typer.Option("--cores", min=1, metavar="N", help="Also estimate the CPU alone, on this many fast cores.")
    ] = None,
    case: Annotated[
        str | None, typer.Option("--case", metavar="CASE", help="phone, fanless, fan or desktop (default: as the chip is sold).")
    ] = None,
    bits: Annotated[
        float, typer.Option("--bits", min=1.0, max=32.0, metavar="N", help="Bits per weight of models that are not installed.")
    ] = BITS,
    acceptance: Annotated[
        float, typer.Option("--acceptance", min=0.0, max=1.0, metavar="SHARE", help="Assumed chance that a drafted token is right.")
    ] = 0.75,
    context: Annotated[int, typer.Option("--context", min=1, metavar="TOKENS", help="Length of the conversation to hold.")] = 2048,
    as_json: AsJson = False,
) -> None:
    """Say whether a model fits a device and what to expect of it. Estimates, from published figures."""
    from edgespec_apps.planning import GB, Question, answer, bytes_from
    from edgespec_apps.sizes import size_of
    from edgespec_device_profiles import cooling, registry

    chip = registry.load(device)
    where = case or chip.cooling[0]
    question = Question(
        chip=chip,
        case=cooling.case(where),
        target=size_of(model, bits=bits),
        draft=size_of(draft, bits=bits) if draft else None,
        memory_bytes=bytes_from(memory) if memory else chip.figures["max_memory_gb"].value * GB,
        watts=watts,
        cores=cores,
        alpha=acceptance,
        context=context,
    )
    found = answer(question)
    if as_json:
        print(json.dumps(found), flush=True)
    else:
        _print(found, question, where)


LIMITS = {
    "memory": "memory size",
    "heat": "heat: it throttles",
    "power": "the power allowed",
    "compute": "compute",
    "bandwidth": "memory bandwidth",
}


def _print(found: dict[str, Any], question: Question, where: str) -> None:
    from edgespec_apps.planning import GB, PROFILE, RESERVE_BYTES, RESERVE_SHARE

    memory, target = found["memory"], question.target
    power = f", at most {question.watts:g} W" if question.watts else ""
    bits = target.weight_bytes * 8 / target.parameters
    paragraph(f"{found['model']} at {bits:.3g} bits per weight on {question.chip.chip} ({where}{power}); all figures are estimates")
    _line(
        "memory",
        f"{'fits' if found['fits'] else 'does not fit'}: weights {memory['weight_bytes'] / GB:.2f} GB, cache of {question.context} tokens"
        f" {memory['kv_bytes'] / GB:.2f} GB, available {memory['available_bytes'] / GB:.2f} of {question.memory_bytes / GB:g} GB"
        f" ({RESERVE_SHARE:.0%} and {RESERVE_BYTES / GB:g} GB are left to the system)",
    )
    _line("held back", f"by {LIMITS[found['bound_by']]}")
    hypothetical = "" if found["fits"] else ", if it did fit"
    _line("speed", f"on the {found['unit'].upper()} about {_speed(found | {'tok_s': math.sqrt(math.prod(found['tok_s']))})}{hypothetical}")
    if on_cores := found["on_cores"]:
        _line("CPU only", f"on {on_cores['cores']} cores about {_speed(on_cores)}{hypothetical}")
    if draft := found["with_draft"]:
        _line("draft", _draft(draft) + hypothetical)
    for line in found["would_change"]:
        _line("note" if line.startswith(PROFILE) else "would help", line)


def _line(label: str, text: str) -> None:
    paragraph(f"  {label:<11}{text}", 13)


def _draft(draft: dict[str, Any]) -> str:
    assumed = f"at an assumed acceptance of {draft['assumed_acceptance']:g}"
    if not draft["best_draft_length"]:
        return f"{draft['draft']}: no draft length gains anything {assumed}"
    large = "" if draft["small_enough"] else ", but it takes more than a tenth of the target's memory"
    return (
        f"{draft['draft']}: drafting {draft['best_draft_length']} tokens a round gives {draft['speed_up']:.2f}x {assumed},"
        f" about {math.sqrt(math.prod(draft['tok_s'])):.1f} tokens/s{large}"
    )


def _speed(found: dict[str, Any]) -> str:
    from edgespec_apps.planning import SPREAD

    sustained, cold = found["tok_s"], found["tok_s_cold"]
    within = f"{sustained / (1 + SPREAD):.1f}–{sustained * (1 + SPREAD):.1f}"
    return f"{sustained:.1f} tokens/s sustained ({within}), {cold:.1f} while cold; {found['joules_per_token']:.2f} J/token"
