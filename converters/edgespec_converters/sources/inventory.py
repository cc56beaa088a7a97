"""Does a file hold exactly the tensors that its architecture needs?"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.core.decoder import DecoderConfig
from edgespec.core.errors import ArtifactError

_SHOWN = 4


def check_tensors(found: Mapping[str, tuple[int, ...]], config: DecoderConfig, where: str) -> None:
    """Compare shapes by Hugging Face name with `config.shapes()`. Raises ArtifactError that lists a few of each kind of fault."""
    expected = config.shapes()
    faults = [
        _list("missing", [name for name in expected if name not in found]),
        _list("unknown", [name for name in found if name not in expected]),
        _list(
            "of another shape",
            [
                f"{name} {list(found[name])} instead of {list(shape)}"
                for name, shape in expected.items()
                if name in found and found[name] != shape
            ],
        ),
    ]
    if any(faults):
        raise ArtifactError(f"{where} does not hold the tensors of a {config.family} model: {'; '.join(f for f in faults if f)}")


def _list(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{more})"
