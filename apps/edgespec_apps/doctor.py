"""`edgespec doctor`: what works on this machine, what does not and why, and what would run where."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps import machine, starting
from edgespec_apps.console import paragraph
from edgespec_apps.options import DEFAULT_MODEL, AsJson

if TYPE_CHECKING:
    from edgespec.orchestrator.store import Package

SCHEMA = "edgespec.doctor/1"
NEVER_RUN = ("Metal (MLX on a Mac's GPU)", "any NPU (Core ML, QNN)", "Windows", "the sensors and energy meters of macOS and Android")
_READS = {
    "source": "on {}",
    "battery": "battery at {:.0%}",
    "low_power_mode": "low-power mode {}",
    "thermal": "heat {}",
    "temperature_c": "hottest {:.0f} °C",
}
_LIBRARIES = ("numpy", "onnxruntime", "mlx", "tokenizers", "sentencepiece", "jinja2")


def doctor(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Also say what would run this model, and where: loads it.", metavar="NAME|FOLDER")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show backends, sensors and energy meters and why they do not work, processors, memory, disk, installed models."""
    found = examine(model)
    if as_json:
        print(json.dumps(found), flush=True)
    else:
        print_report(found)


def examine(model: str | None) -> dict[str, Any]:
    """Everything the report shows. Raises ArtifactError for a `model` that is not there."""
    import edgespec
    from edgespec.orchestrator import engines, store

    damaged: dict[str, str] = {}
    packages = store.list_packages(lambda name, error: damaged.update({name: str(error)}))
    home = store.home()
    return {
        "schema": SCHEMA,
        "backends": {name: _about(name) for name in engines.NAMES},
        "versions": {"edgespec": edgespec.__version__} | {name: version(name) for name in _LIBRARIES},
        "machine": machine.describe(),
        "profile": {"model": model or DEFAULT_MODEL} | starting.describe(model or DEFAULT_MODEL),
        "sensors": _sensors(),
        "energy_meters": _energy_meters(),
        "home": str(home),
        "disk_free_bytes": shutil.disk_usage(_existing(home)).free,
        "models": {package.name: [f"{a.engine} {a.recipe}" for a in package.manifest.artifacts] for package in packages},
        "damaged": damaged,
        "model": _about_model(store.find_package(model)) if model else None,
        "never_run_on": list(NEVER_RUN),
    }


def _about(name: str) -> dict[str, Any]:
    """Whether a backend works, and if not why."""
    from edgespec.orchestrator import engines

    try:
        backend = engines.backend(name)
        why_not = backend.why_not()
        return {"available": why_not is None, "why_not": why_not, "what": None if why_not else backend.describe()}
    except Exception as error:  # a broken device library may raise anything
        return {"available": False, "why_not": f"cannot be used ({type(error).__name__}: {error})", "what": None}


def _sensors() -> dict[str, Any]:
    """By sensor: whether it can tell anything about this machine, and what, or why not."""
    from edgespec.scheduling.sensors import try_sources

    found: dict[str, Any] = {}
    for name, reading in try_sources().items():
        known = {} if isinstance(reading, str) else {key: value for key, value in asdict(reading).items() if value is not None}
        why_not = reading if isinstance(reading, str) else None if known else "this machine shows it neither heat nor battery"
        found[name] = {"available": why_not is None, "why_not": why_not, "reading": known or None}
    return found


def _energy_meters() -> dict[str, Any]:
    """By meter, best first: whether it works, or why not. The first that works is the one in use."""
    from edgespec.scheduling.meters import try_meters

    return {
        name: {"available": not isinstance(meter, str), "why_not": meter if isinstance(meter, str) else None}
        for name, meter in try_meters().items()
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _existing(folder: Path) -> Path:
    return folder if folder.exists() or folder == folder.parent else _existing(folder.parent)


def _about_model(package: Package) -> dict[str, Any]:
    """`choices`, and for each engine that `--engine auto` may take where its work runs.

    The reference engine is left out: it would unpack every weight to four bytes only to say that NumPy runs on the CPU.
    """
    from edgespec.orchestrator import engines

    found = choices(package)
    return found | {"where": {name: where(package, name) for name in engines.preference() if name in found["works"]}}


def where(package: Package, engine: str) -> dict[str, Any]:
    """Where this engine's work runs, found out by loading the model and running it."""
    from edgespec.core.placement import placement_of
    from edgespec.orchestrator import engines

    try:
        loaded, _ = engines.load(package, engine=engine, recipe=None, threads=None)
        with closing(loaded):
            found = placement_of(loaded)
    except Exception as error:  # a broken device library may raise anything
        return {"what": f"cannot be found out ({type(error).__name__}: {error})"}
    if found is None:
        return {"what": "this engine cannot tell"}
    return {"what": found.describe(), "unit": found.label, **asdict(found)}


def choices(package: Package) -> dict[str, Any]:
    """For each backend the artifact it would run, or why none; `auto` is the backend that `--engine auto` takes."""
    from edgespec.core.errors import CapabilityError
    from edgespec.orchestrator import engines

    manifest = package.manifest
    backends: dict[str, str] = {}
    works: list[str] = []
    for name in engines.NAMES:
        about = _about(name)
        if not about["available"]:
            backends[name] = f"cannot run: {about['why_not']}"
            continue
        try:
            _, artifact = engines.choose(manifest, name, None)
        except CapabilityError as error:
            backends[name] = f"cannot run: {error}"
        else:
            works.append(name)
            backends[name] = f"{artifact.engine} {artifact.recipe}, {artifact.weight_bytes / 1e6:.0f} MB of weights, {about['what']}"
    return {
        "name": manifest.name,
        "draft": manifest.draft or "ngram",
        "auto": next((name for name in engines.preference() if name in works), None),
        "kv_bytes_at_full_context": manifest.decoder.kv_bytes_per_token() * manifest.decoder.max_context,
        "max_context": manifest.decoder.max_context,
        "backends": backends,
        "works": works,
    }


def print_report(found: Mapping[str, Any]) -> None:
    about = found["machine"]
    _section("Backends", [f"{name}: {b['what'] or 'not available: ' + b['why_not']}" for name, b in found["backends"].items()])
    _section(
        "Machine",
        [
            f"{about['system']} on {about['architecture']}, {about['processor']}",
            f"{about['physical_cores']} physical cores to use, load {about['load_average'][0]:.2f}",
            f"memory {about['memory_bytes'] / 1e9:.1f} GB, {about['memory_available_bytes'] / 1e9:.1f} GB available",
            f"store {found['home']}, {found['disk_free_bytes'] / 1e9:.1f} GB free on its disk",
            *(f"environment {name}={value}" for name, value in about["preset_variables"].items()),
        ],
    )
    _section(f"Costs that the scheduler assumes at first for {found['profile']['model']}", [found["profile"]["what"]])
    _section("Sensors", [_sensor_line(name, s) for name, s in found["sensors"].items()] or ["none known for this system"])
    meters = [f"{name}: {'works' if m['available'] else 'not available: ' + m['why_not']}" for name, m in found["energy_meters"].items()]
    _section("Energy meters (the first that works is used)", meters or ["none known for this system"])
    _section("Versions", [f"{name} {number or 'not installed'}" for name, number in found["versions"].items()])
    models = [f"{name}: {', '.join(engines)}" for name, engines in found["models"].items()]
    _section(
        "Models", models + [f"damaged: {problem}" for problem in found["damaged"].values()] or ["none; run `edgespec pull smollm2-135m`"]
    )
    if model := found["model"]:
        lines = [f"{name}{' (auto)' if name == model['auto'] else ''}: {choice}" for name, choice in model["backends"].items()]
        cache = f"{model['kv_bytes_at_full_context'] / 1e9:.2f} GB of cache when full"
        _section(f"{model['name']}, draft {model['draft']}, context up to {model['max_context']} tokens ({cache})", lines)
        _section(
            "Where its work runs",
            [f"{name}: {found['what']}" for name, found in model["where"].items()] or ["no engine that --engine auto may take works here"],
        )
    _section("This build was never run on", found["never_run_on"])


def _sensor_line(name: str, sensor: Mapping[str, Any]) -> str:
    if not sensor["available"]:
        return f"{name}: not available: {sensor['why_not']}"
    return f"{name}: " + ", ".join(_READS[key].format(value) for key, value in sensor["reading"].items())


def _section(title: str, lines: Sequence[str]) -> None:
    print(title)
    for line in lines:
        paragraph(f"  {line}", 4)
