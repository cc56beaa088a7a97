"""edgespec: exact speculative decoding on the device in your hand. Start reading at orchestrator/loop.py.

import edgespec

with edgespec.open("smollm2-135m") as session:
    for chunk in session.stream("Why is the sky blue?"):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.core.cancel import CancelToken as CancelToken
    from edgespec.core.plan import Knobs as Knobs
    from edgespec.core.sampling import Sampling as Sampling
    from edgespec.orchestrator.runtime import Runtime as Runtime
    from edgespec.orchestrator.runtime import load as load
    from edgespec.orchestrator.runtime import open_session as open
    from edgespec.orchestrator.session import Session as Session

__version__ = "0.1.0"

# Resolved on first use, so that importing edgespec loads nothing but this file.
_PLACES = {
    "CancelToken": ("edgespec.core.cancel", "CancelToken"),
    "Knobs": ("edgespec.core.plan", "Knobs"),
    "Sampling": ("edgespec.core.sampling", "Sampling"),
    "Runtime": ("edgespec.orchestrator.runtime", "Runtime"),
    "Session": ("edgespec.orchestrator.session", "Session"),
    "load": ("edgespec.orchestrator.runtime", "load"),
    "open": ("edgespec.orchestrator.runtime", "open_session"),
}
__all__ = ["CancelToken", "Knobs", "Runtime", "Sampling", "Session", "__version__", "load", "open"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)
