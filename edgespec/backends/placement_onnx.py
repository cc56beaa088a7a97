"""Where ONNX Runtime ran a graph, read from its profile.

Checked against ONNX Runtime 1.32 on a CPU, and against a graph split between onnxruntime-qnn 2.7 (its emulator of the NPU on
x86-64) and the CPU. What is said about other providers comes from their documentation and has never been run.
"""

from __future__ import annotations

import json
import math
import platform
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any, cast

from edgespec.core.errors import ArtifactError
from edgespec.core.placement import UNKNOWN, Placement, UnitWork

_ON = {
    "CPUExecutionProvider": "cpu",
    "XnnpackExecutionProvider": "cpu",
    "CUDAExecutionProvider": "gpu",
    "DmlExecutionProvider": "gpu",
    "NvTensorRTRTXExecutionProvider": "gpu",
    "TensorrtExecutionProvider": "gpu",
    "WebGpuExecutionProvider": "gpu",
}
_CONTAINERS = ("If", "Loop", "Scan")  # their time is that of the nodes inside, which have events of their own
_KERNEL = "_kernel_time"  # fences and copies around a kernel have other endings
_ARM = ("arm64", "aarch64")
_LONGEST_US = 1e15  # three decades: what is longer was damaged

Options = Mapping[str, Mapping[str, str]]  # provider -> its options, as `session.get_provider_options()` gives them


def unit_of(provider: str, options: Mapping[str, str], *, machine: str) -> str:
    """The unit a provider's nodes run on, "unknown" if it chooses by itself. `machine`: as `platform.machine()` says.

    Core ML may take any unit that it is not forbidden, and no option forbids it the CPU. QNN's library for the NPU is an
    emulator wherever the processor is no ARM.
    """
    if provider == "CoreMLExecutionProvider":
        return "cpu" if options.get("MLComputeUnits") == "CPUOnly" else UNKNOWN
    if provider == "QNNExecutionProvider":
        library = PureWindowsPath(options.get("backend_path") or options.get("backend_type", "")).stem
        kind = library.lower().removeprefix("lib").removeprefix("qnn")
        unit = {"htp": "npu", "gpu": "gpu", "cpu": "cpu"}.get(kind, UNKNOWN)
        return "cpu" if unit == "npu" and machine.lower() not in _ARM else unit
    return _ON.get(provider, UNKNOWN)


def read_profile(
    text: str,
    *,
    assigned: Mapping[str, int] | None = None,
    options: Options | None = None,
    library: str = "ONNX Runtime",
    machine: str | None = None,
) -> Placement:
    """The profile that a session wrote (trace events as JSON, `dur` in microseconds).

    A share is a unit's part of the time spent in kernels; the first of several passes only warms up. `assigned`: nodes of the
    graph by provider. Without it a provider that fuses nodes counts as the few it made of them. ArtifactError for text that is
    no such profile or has no times in it.
    """
    time_us: dict[str, float] = defaultdict(float)
    seen: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for provider, node, op, us in _warm_kernels(_events(text)):
        seen[provider].add(node)
        time_us[provider] += 0.0 if op in _CONTAINERS else us
    total_us = math.fsum(time_us.values())
    if not total_us > 0.0:
        raise ArtifactError(f"the profile of {library} has {sum(map(len, seen.values()))} nodes and no time spent in them; run more passes")
    counts = {provider: len(nodes) for provider, nodes in seen.items()} | dict(assigned or {})
    by_unit: dict[str, list[str]] = defaultdict(list)
    for provider in sorted(counts, key=lambda provider: -time_us[provider]):
        unit = unit_of(provider, (options or {}).get(provider, {}), machine=machine or platform.machine())
        by_unit[unit].append(provider)
    units = {
        unit: UnitWork(
            nodes=sum(counts[provider] for provider in providers),
            share=math.fsum(time_us[provider] for provider in providers) / total_us,
            by=", ".join(providers),
        )
        for unit, providers in by_unit.items()
    }
    return Placement(units=units, source=f"timed by {library}")


def _events(text: str) -> list[dict[str, Any]]:
    try:
        events = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"a profile of ONNX Runtime is no JSON ({error}); it was cut short or is another file") from error
    if not isinstance(events, list):
        raise ArtifactError(f"a profile of ONNX Runtime is a list of events, got a {type(events).__name__}")
    for event in cast("list[object]", events):
        if not isinstance(event, dict):
            raise ArtifactError(f"an event of ONNX Runtime's profile is an object, got {event!r:.80}")
    return cast("list[dict[str, Any]]", events)


def _warm_kernels(events: list[dict[str, Any]]) -> list[tuple[str, tuple[str, str], str, float]]:
    """(provider, (name, index), operator, microseconds) of every kernel event, without those of the first pass if there are more."""
    passes = sorted(_number(event, "ts") for event in events if event.get("cat") == "Session" and event.get("name") == "model_run")
    begin = passes[1] if len(passes) > 1 else -math.inf
    found: list[tuple[str, tuple[str, str], str, float]] = []
    for event in events:
        name = event.get("name")
        if event.get("cat") != "Node" or not isinstance(name, str) or not name.endswith(_KERNEL) or _number(event, "ts") < begin:
            continue
        arguments = event.get("args")
        known = cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {}
        provider = known.get("provider")
        if not isinstance(provider, str) or not provider:
            raise ArtifactError(f"event {name!r} of ONNX Runtime's profile names no provider")
        found.append((provider, (name, str(known.get("node_index"))), str(known.get("op_name")), _number(event, "dur")))
    return found


def _number(event: Mapping[str, Any], key: str) -> float:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LONGEST_US:
        raise ArtifactError(f"event {event.get('name')!r} of ONNX Runtime's profile has {key} {value!r}, expected microseconds >= 0")
    return float(value)
