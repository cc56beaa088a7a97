"""What a session may start from on a machine that nobody has profiled: the chip file's figures and what they let one model's rows cost."""

from __future__ import annotations

from dataclasses import replace

from edgespec.core.device import DeviceProfile, UnitProfile
from edgespec.core.engine import ModelSpec
from edgespec_device_profiles.chips import Chip
from edgespec_device_profiles.estimates import ModelSize, Unit, bandwidth_gbs, pass_ms, units

ROWS = (1, 2, 4, 8, 16)
CONTEXTS = (128, 512, 2048, 8192)
LAYER_WEIGHTS = 12  # of a layer, over hidden²: within a third for the families that are read here


def prior(chip: Chip, spec: ModelSpec, unit: Unit) -> DeviceProfile:
    """Estimates for this model on the unit that runs it; of the other units bandwidth, and watts where the chip file has them.

    What two units cost each other is left out: that depends on who shares the memory, and a chip file cannot know it.
    """
    device = chip.device()
    rated = {
        name: replace(device.units.get(name, UnitProfile()), bandwidth_gbs=bandwidth_gbs(chip, name))  # as reached by decoders
        for name in units(chip)
    }
    rated[unit] = replace(rated[unit], forward_ms=_forward_ms(chip, size_of(spec), unit, spec.max_context))
    return replace(
        device,
        units=rated,
        overlap_penalty=None,
        estimated=True,
        provenance=f"estimates for {spec.name} from the chip file {chip.name}; nothing measured here",
    )


def size_of(spec: ModelSpec) -> ModelSize:
    """The weights that a token is multiplied with are counted from the model's shape, because bytes say nothing of their number."""
    return ModelSize(
        name=spec.name,
        parameters=LAYER_WEIGHTS * spec.layers * spec.hidden**2 + spec.vocab_size * spec.hidden,
        weight_bytes=spec.weight_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token,
    )


def _forward_ms(chip: Chip, size: ModelSize, unit: Unit, max_context: int) -> dict[int, dict[int, float]]:
    contexts = [context for context in CONTEXTS if context <= max_context] or [max_context]
    return {rows: {context: pass_ms(chip, unit, size, rows=rows, context=context) for context in contexts} for rows in ROWS}
