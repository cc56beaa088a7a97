"""What a session knows of this machine before its first round: a measured profile, estimates from the chip's file, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec_apps import machine
from edgespec_apps.console import say

if TYPE_CHECKING:
    from edgespec.core.device import DeviceProfile
    from edgespec.core.engine import ModelSpec
    from edgespec_device_profiles.registry import Detected


def measured_profile(model: str) -> DeviceProfile | None:
    """What `edgespec profile` last found out about this machine, with this model if it was tried; None before its first run.

    Figures of another model are estimates for this one.
    """
    from edgespec.orchestrator.store import home

    folder = home() / "profiles"
    if not folder.is_dir():
        return None
    from dataclasses import replace

    from edgespec_device_profiles import history

    name = Path(model if Path(model).is_dir() else model.rpartition("@")[0] or model).name
    here = history.machine_name(machine.processor(), machine.cores())
    found = history.latest(folder, here, model=name, on_damaged=lambda error: say(f"ignoring a profile: {error}"))
    return replace(found.device(), estimated=found.model.name != name) if found else None


def chip_estimate(spec: ModelSpec, unit: str) -> DeviceProfile | None:
    """For a model that runs on this unit; None on a chip that has no file, or for a unit that its file does not describe."""
    chip = this_chip().chip
    if chip is None:
        return None
    from edgespec_device_profiles import estimates, priors

    known: dict[str, estimates.Unit] = {name: name for name in estimates.units(chip)}
    return priors.prior(chip, spec, known[unit]) if unit in known else None


def this_chip() -> Detected:
    """Found out once. A damaged chip file is said and otherwise no obstacle."""
    from edgespec.core.errors import ArtifactError
    from edgespec_device_profiles import registry

    try:
        return registry.detected()
    except ArtifactError as error:
        say(f"ignoring the chip files: {error}")
        return registry.Detected(os="", reported="", memory_bytes=None, chip=None)


def describe(model: str) -> dict[str, Any]:
    """What sessions with this model will start from: `kind` is measured, estimated or none; `what` is said to people."""
    if (profile := measured_profile(model)) is not None:
        note = f"; estimates for {model}" if profile.estimated else ""
        return {"kind": "estimated" if profile.estimated else "measured", "what": profile.provenance + note}
    detected = this_chip()
    if detected.chip is not None:
        return {"kind": "estimated", "what": f"estimates from the chip file {detected.chip.name}; `edgespec profile` measures instead"}
    return {"kind": "none", "what": f"nothing: no chip file for {detected.reported or 'this processor'}; `edgespec profile` measures it"}
