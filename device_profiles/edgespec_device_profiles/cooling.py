"""Cases that chips sit in: what they carry for ever, how fast they warm, how hard the chip is driven at first.

Only ratios of power are known from published runs (throughput over time); watts follow from a chip's sustained figure, which
is an estimate. The phone is fitted to three sustained runs of one phone, whose error `phone_fit_error` states; the laptop cases
rest on one published sentence each, the desktop on none. All are estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from edgespec.backends.simulated import Throttle, VirtualDevice
from edgespec.core.errors import ArtifactError
from edgespec.scheduling.thermal import Stage, ThermalModel
from edgespec_device_profiles.chips import Chip

CaseName = Literal["phone", "fanless", "fan", "desktop"]
EXPONENT = 1.3  # power ∝ speed^1.3, fitted to the phone's three runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Powers are multiples of what the case carries for ever at the throttle's limit."""

    sustained_share: float | None  # of the chip's sustained watts; None: `sustained_w` for any chip
    sustained_w: float = 0.0
    gpu: float  # decoding on the GPU at full speed
    npu: float
    stages: tuple[tuple[float, float], ...]  # (share of the rise, time constant in s)
    limit_c: float
    source: str


AMBIENT_C = 25.0
IDLE = 0.05  # of the sustained power

CASES: dict[CaseName, Case] = {
    "phone": Case(
        sustained_share=None,
        sustained_w=2.5,
        gpu=3.54,
        npu=1.72,
        stages=((0.357, 2.5), (0.643, 169.0)),
        limit_c=70.0,
        source="fitted to three published 10-minute runs of one phone; 2–3 W sustained (omr.it.com)",
    ),
    "fanless": Case(
        sustained_share=0.5,
        gpu=2.5,
        npu=1.25,
        stages=((0.1, 10.0), (0.9, 1200.0)),
        limit_c=90.0,
        source="a fanless laptop throttles after 8–15 min, down up to 60 % (solidaitech); NPU half the GPU's power",
    ),
    "fan": Case(
        sustained_share=1.0,
        gpu=1.6,
        npu=0.8,
        stages=((0.3, 5.0), (0.7, 120.0)),
        limit_c=95.0,
        source="a laptop with fans lost about 30 % over five long runs (antirez/ds4 #52); NPU 12.7 W beside 24.7 W on the GPU",
    ),
    "desktop": Case(
        sustained_share=1.0, gpu=0.9, npu=0.45, stages=((0.3, 5.0), (0.7, 240.0)), limit_c=95.0, source="assumed never to throttle"
    ),
}


def case(name: str) -> Case:
    """ArtifactError names the known cases."""
    for known in get_args(CaseName):
        if known == name:
            return CASES[known]
    raise ArtifactError(f"no case named {name!r}; known: {', '.join(get_args(CaseName))}")


def sustained_w(chip: Chip, where: Case) -> float:
    """Watts that the case carries for ever at the throttle's limit."""
    return where.sustained_w if where.sustained_share is None else where.sustained_share * chip.figures["sustained_watts"].value


def speed_at(watts: float, full_w: float) -> float:
    """Share of full speed that this much of the full power buys."""
    return min(1.0, (watts / full_w) ** (1.0 / EXPONENT))


def device(chip: Chip, where: Case) -> VirtualDevice:
    """The chip at ambient temperature in that case, at full speed, units "cpu", "gpu" and "npu"."""
    watts = sustained_w(chip, where)
    return _device(where, watts, {"cpu": where.gpu * watts, "gpu": where.gpu * watts, "npu": where.npu * watts}, IDLE * watts)


def thermal_model(chip: Chip, where: Case) -> ThermalModel:
    return _model(where, sustained_w(chip, where))


def _model(where: Case, watts: float) -> ThermalModel:
    per_w = (where.limit_c - AMBIENT_C) / watts
    return ThermalModel(AMBIENT_C, tuple(Stage(share * per_w, tau_s) for share, tau_s in where.stages))


def _device(where: Case, watts: float, busy_w: dict[str, float], idle_w: float) -> VirtualDevice:
    throttle = Throttle(limit_c=where.limit_c, exponent=EXPONENT)
    return VirtualDevice(heat=_model(where, watts).cold(), busy_w=busy_w, idle_w=idle_w, throttle=throttle)


PHONE_RUNS = (  # published: (power at full speed by our fit, tokens/s at 10 min over the first, seconds to lose a tenth)
    ("GPU, MLX 48 → 18 tok/s", 3.54, 18 / 48, 5.0),
    ("GPU, LiteRT 56 → 27 tok/s", 2.65, 27 / 56, 13.0),
    ("NPU, Core ML 33 → 22 tok/s", 1.72, 22 / 33, 93.0),
)


def phone_fit() -> list[tuple[str, float, float, float, float]]:
    """Per run: name, simulated and published end share, simulated and published seconds to −10 %."""
    where = CASES["phone"]
    out: list[tuple[str, float, float, float, float]] = []
    for name, power, end, onset_s in PHONE_RUNS:
        chip = _device(where, where.sustained_w, {"unit": power * where.sustained_w}, 0.0)
        found_s, speeds = math.inf, list[float]()
        while chip.clock_s < 600.0:
            chip.work("unit", 250.0 * chip.speed)
            if found_s == math.inf and chip.speed <= 0.9:
                found_s = chip.clock_s
            if chip.clock_s > 585.0:
                speeds.append(chip.speed)
        out.append((name, sum(speeds) / len(speeds), end, found_s, onset_s))
    return out


def phone_fit_error() -> float:
    """Largest relative error of the simulated throughput after ten minutes in the three runs the phone was fitted to."""
    return max(abs(found / published - 1.0) for _, found, published, _, _ in phone_fit())
