"""Where Core ML plans to run a program, read from its compute plan as plain data. Never run on a device.

`MLComputePlan` (macOS 14.4) gives for each operation `get_compute_device_usage_for_mlprogram_operation(op)`, with its
`preferred_compute_device`, and `get_estimated_cost_for_mlprogram_operation(op).weight`; constants have neither.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from edgespec.core.errors import ArtifactError
from edgespec.core.placement import Placement, UnitWork

_UNIT = {"MLCPUComputeDevice": "cpu", "MLGPUComputeDevice": "gpu", "MLNeuralEngineComputeDevice": "npu"}


def read_plan(operations: Mapping[str, tuple[str | None, float | None]]) -> Placement:
    """`operations`: name -> (class name of the preferred device, estimated cost of any common scale), None where there is none.

    A share is a unit's part of the summed estimates; an operation with a device but no estimate counts as a node. A plan is an
    intention: the device may still fall back. ArtifactError for devices or costs that make no sense, and for a plan without costs.
    """
    nodes: dict[str, int] = defaultdict(int)
    cost: dict[str, float] = defaultdict(float)
    for name, (device, estimate) in operations.items():
        if device is None:
            continue
        if device not in _UNIT:
            raise ArtifactError(f"operation {name!r} of a Core ML compute plan prefers {device!r}; known are {', '.join(_UNIT)}")
        if estimate is not None and not 0.0 <= estimate < math.inf:
            raise ArtifactError(f"operation {name!r} of a Core ML compute plan costs {estimate!r}, expected a number >= 0")
        nodes[_UNIT[device]] += 1
        cost[_UNIT[device]] += estimate or 0.0
    total = math.fsum(cost.values())
    if not 0.0 < total < math.inf:
        raise ArtifactError(f"a Core ML compute plan with {sum(nodes.values())} placed operations estimates no cost for them")
    units = {unit: UnitWork(nodes=nodes[unit], share=cost[unit] / total) for unit in nodes}
    return Placement(units=units, source="estimated by Core ML's compute plan")
