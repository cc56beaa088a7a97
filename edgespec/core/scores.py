"""Two kinds of vocabulary-wide numbers, kept apart by type so one cannot be passed as the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Logits(Protocol):
    """Raw model outputs of n scored rows; they stay on the device. Judges ask only these questions.

    Every row is `ModelSpec.vocab_size` wide: padding columns that a model carries beyond its tokenizer
    never leave the engine.
    """

    def __len__(self) -> int: ...
    def argmax(self) -> Int32:
        """int32 [n]; equal logits give the lowest id."""
        ...

    def gather(self, ids: Int32) -> Float32:
        """float32 [n]: the logit of ids[i] in row i."""
        ...

    def row(self, i: int) -> Float32:
        """float32 [V]: one row on the host. Callers must not write to it; it is valid until the next forward pass."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LogProbs:
    """Normalised log-probabilities, natural logarithm: float32 [n, V], or [n, H] over a hot vocabulary `ids` [H]."""

    values: Float32
    ids: Int32 | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 2:
            raise ValueError(f"LogProbs needs [n, V], got shape {self.values.shape}")
        if self.ids is not None and self.ids.shape != (self.values.shape[1],):
            raise ValueError(f"LogProbs has {self.values.shape[1]} columns but {len(self.ids)} hot ids")

    def check(self) -> None:
        """Raise ValueError unless every row sums to 1; tests and contract suites call it, the loop does not pay for it."""
        total = np.exp(self.values.astype(np.float64)).sum(-1)
        if not np.allclose(total, 1.0, atol=1e-3):
            raise ValueError(
                f"LogProbs rows must each sum to 1 (found {total.min():.4f}..{total.max():.4f}); pass logits through `normalise` first"
            )

    def dense(self, node: int, vocab_size: int) -> Float64:
        """float64 [V] probabilities of one node: the hot vocabulary scattered out, a narrower law zero-extended."""
        q = np.zeros(vocab_size, np.float64)
        law = np.exp(self.values[node].astype(np.float64))
        if self.ids is None:
            q[: len(law)] = law
        else:
            q[self.ids] = law
        return q


class HostLogits:
    """Logits that already live in host memory: the reference engine's, and ONNX Runtime's CPU output seen in place."""

    __slots__ = ("_values",)

    def __init__(self, values: Float32) -> None:
        self._values = values  # [n, V]

    def __len__(self) -> int:
        return len(self._values)

    def argmax(self) -> Int32:
        return self._values.argmax(-1).astype(np.int32)

    def gather(self, ids: Int32) -> Float32:
        return self._values[np.arange(len(self._values)), ids]

    def row(self, i: int) -> Float32:
        return self._values[i]
