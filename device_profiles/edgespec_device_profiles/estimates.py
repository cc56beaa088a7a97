"""What a model should cost on a chip nobody has measured: a roofline with usual efficiencies. Every figure from here is an estimate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from edgespec.analysis import decode_floor_ms
from edgespec.core.errors import ArtifactError
from edgespec_device_profiles.chips import Chip

Unit = Literal["cpu", "gpu", "npu"]

BANDWIDTH_REACHED = 0.7  # of the specified figure, by decoders in practice
COMPUTE_REACHED = 0.3  # of the peak, by quantised products of few rows
CORE_TFLOPS = 0.1  # per performance core: ~3 GHz, two 128-bit fused multiply-adds, half precision
NPU_FP16_SHARE = 0.4  # of advertised int8 TOPS, where no fp16 figure was measured
OVERHEAD_MS = 0.3  # per pass, where no dispatch floor was measured
BITS = 4.5  # per weight: four bits and a scale per block
KV_BYTES_PER_BILLION = 16_000  # per token, half precision, grouped-query attention
_SIZE = re.compile(r"(?:^|[^0-9.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What the cost of a model depends on."""

    name: str
    parameters: float
    weight_bytes: float
    kv_bytes_per_token: float


def size_from_name(name: str, *, bits: float = BITS) -> ModelSize:
    """The size that a name such as "qwen2.5-coder-1.5b" or "7B" states. ArtifactError if it states none."""
    found = _SIZE.findall(name)
    if not found:
        raise ArtifactError(f"{name!r} is not installed and names no size; name one, like 7b or smollm2-135m")
    number, suffix = found[-1]
    billions = float(number) * (1.0 if suffix.lower() == "b" else 1e-3)
    return ModelSize(
        name=name,
        parameters=billions * 1e9,
        weight_bytes=billions * 1e9 * bits / 8,
        kv_bytes_per_token=billions * KV_BYTES_PER_BILLION,
    )


def units(chip: Chip) -> tuple[Unit, ...]:
    """The units whose speed can be estimated."""
    return ("cpu", "gpu", "npu") if chip.value("npu_tops") is not None else ("cpu", "gpu")


def bandwidth_gbs(chip: Chip, unit: Unit) -> float:
    """Of the unit, not of the chip: an NPU reads far slower than the memory could deliver."""
    whole = chip.figures["bandwidth_gbs"].value
    return (chip.value("npu_bandwidth_gbs") or 0.5 * whole) if unit == "npu" else whole * BANDWIDTH_REACHED


def peak_tflops(chip: Chip, unit: Unit, *, cores: int | None = None) -> float:
    if unit == "cpu":
        return (cores or chip.figures["performance_cores"].value) * CORE_TFLOPS
    if unit == "gpu":
        return chip.figures["gpu_fp16_tflops"].value
    return chip.value("npu_fp16_tflops") or (chip.value("npu_tops") or 0.0) * NPU_FP16_SHARE


def pass_ms(chip: Chip, unit: Unit, size: ModelSize, *, rows: int, context: int, cores: int | None = None) -> float:
    """One forward pass of `rows` rows after `context` tokens: bandwidth and compute, whichever is slower, plus dispatch."""
    memory = decode_floor_ms(size.weight_bytes, size.kv_bytes_per_token * context, bandwidth_gbs(chip, unit))
    compute = 2 * size.parameters * rows / (peak_tflops(chip, unit, cores=cores) * COMPUTE_REACHED * 1e12) * 1e3
    floor = (chip.value("npu_dispatch_floor_ms") if unit == "npu" else None) or OVERHEAD_MS
    return floor + (memory**4 + compute**4) ** 0.25  # a rounded corner: both overlap, neither perfectly
