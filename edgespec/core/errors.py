"""Every error a caller may want to catch.

EdgespecError
├── CapabilityError   the chosen parts cannot work together; raised when a session opens
│   └── ContextLengthError   the prompt does not fit the context window; raised before any compute
├── ArtifactError     a model package, source file or profile is missing, damaged or stale
├── DeviceError       a device library failed; its own exception is the cause
├── ContractError     a part broke its promise to the loop; always a bug in that part
└── Cancelled         the caller asked to stop; sessions turn it into the finish reason "cancelled"

Bad arguments are `ValueError`. A message says what, what was found, what to do.
"""

from __future__ import annotations


class EdgespecError(Exception):
    """Base class of all edgespec errors."""


class CapabilityError(EdgespecError):
    """The chosen parts cannot work together."""


class ContextLengthError(CapabilityError):
    """The prompt does not fit the context window."""


class ArtifactError(EdgespecError):
    """A model package, source file or profile is missing, damaged or stale."""


class DeviceError(EdgespecError):
    """A device library failed; its own exception is the `__cause__`."""


class ContractError(EdgespecError):
    """A part broke its promise to the loop: a bug in that part."""


class Cancelled(EdgespecError):
    """Work was stopped because the caller asked for it."""
