"""The seam between the runtime and any device: a loaded model, and one cache per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import ROOT, Draft, chain_parents, check_parents, is_chain
from edgespec.core.scores import Int32, Logits


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Tokens of one sequence for one forward pass: `token_ids` int32 [n], `parents` int32 [n] as in Draft.

    Row i sees the committed context and its own ancestors. Only the last `scored` rows need logits
    (None: all of them); a prefill asks for 0. Padding to static shapes is the engine's affair.
    """

    token_ids: Int32
    parents: Int32
    scored: int | None = None

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        check_parents(self.parents, n)
        if n == 0:
            raise ValueError("a TokenBatch needs at least one token")
        if self.scored is not None and not 0 <= self.scored <= n:
            raise ValueError(f"scored must lie in 0..{n}, got {self.scored}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_scored(self) -> int:
        return len(self.token_ids) if self.scored is None else self.scored

    @classmethod
    def chain(cls, token_ids: Sequence[int] | Int32, *, scored: int | None = None) -> Self:
        ids = np.asarray(token_ids, np.int32)
        return cls(ids, chain_parents(len(ids)), scored)

    @classmethod
    def rooted(cls, last: int, draft: Draft) -> Self:
        """The draft behind the one emitted token the target has not read yet: node i becomes row i + 1.

        This is the only place where that shift happens on the way in; verifiers read it back as row `node + 1`.
        """
        n = len(draft)
        token_ids = np.empty(n + 1, np.int32)
        token_ids[0], token_ids[1:] = last, draft.token_ids
        if is_chain(draft.parents):
            return cls(token_ids, chain_parents(n + 1))
        return cls(token_ids, np.concatenate([np.array([ROOT], np.int32), draft.parents + 1]).astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """`logits` of the scored rows; `features` [n, D…] of all rows, or None unless asked for. Valid until the next forward."""

    logits: Logits
    features: Any = None


class Cache(Protocol):
    """Keys and values of one sequence. `forward` writes beyond `length`; `commit` says what to keep."""

    @property
    def length(self) -> int:
        """Committed tokens."""
        ...

    @property
    def capacity(self) -> int:
        """Most tokens that can ever be committed."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def host_bytes_copied(self) -> int:
        """Bytes of weights-sized, KV or vocabulary-wide data copied between device and host for this sequence, ever growing.

        Token ids, positions and single numbers do not count. Zero on engines that share memory with the host.
        """
        ...

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep this root-to-node path of the last batch's rows, in order; drop the rest. ValueError if it is no path."""
        ...

    def truncate(self, length: int) -> None:
        """Forget everything after the first `length` committed tokens. ValueError if that is more than `length`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """`vocab_size` counts real token ids (padding excluded); models fit together when their `vocab_digest` agrees.

    `vocab_digest`: sha256 over id → bytes. `weight_bytes` are read per decoded token; `kv_bytes_per_token` per committed token.
    """

    name: str
    vocab_size: int
    vocab_digest: str
    max_context: int
    layers: int
    hidden: int
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do; sessions refuse at the door what is missing.

    `static_rows`: batch sizes a static graph offers, or None when any size runs. `rollback` "path" commits tree paths,
    "tail" only chains. `width_invariant`: a row's logits do not depend, bit for bit, on how many rows are scored with it.
    """

    unit: str = "cpu"
    static_rows: tuple[int, ...] | None = None
    max_rows: int = 1 << 16
    rollback: Literal["tail", "path"] = "path"
    features: bool = False
    max_sequences: int = 1
    width_invariant: bool = False


class Engine(Protocol):
    """One loaded model. Thread-safe: one forward pass runs at a time, several caches may be alive."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def capabilities(self) -> Capabilities: ...
    def new_cache(self, capacity: int) -> Cache:
        """A cache for at most `capacity` committed tokens. ValueError beyond `spec.max_context`."""
        ...

    def forward(
        self, work: Sequence[tuple[TokenBatch, Cache]], *, features: bool = False, cancel: CancelToken | None = None
    ) -> list[Scores]:
        """Score one batch per sequence. Raises Cancelled, with every cache as it was, if `cancel` is set meanwhile;
        ValueError for token ids outside the vocabulary or batches that overflow the cache."""
        ...

    def close(self) -> None: ...


def check_batch(batch: TokenBatch, cache: Cache, spec: ModelSpec, capabilities: Capabilities) -> None:
    """The checks every engine makes before it touches the device (ONNX Runtime itself raises nothing for them)."""
    low, high = int(batch.token_ids.min()), int(batch.token_ids.max())
    if low < 0 or high >= spec.vocab_size:
        raise ValueError(f"token ids must lie in 0..{spec.vocab_size - 1}, got {low}..{high}")
    if cache.length + len(batch) > cache.capacity:
        raise ValueError(f"{len(batch)} rows do not fit: {cache.length} of {cache.capacity} tokens are committed")
    if len(batch) > capabilities.max_rows:
        raise ValueError(f"{len(batch)} rows exceed this engine's {capabilities.max_rows}")
    if capabilities.rollback == "tail" and not np.array_equal(batch.parents, chain_parents(len(batch))):
        raise ValueError("this engine scores chains only")


def check_path(nodes: Sequence[int], parents: Int32 | None) -> None:
    """Raise ValueError unless `nodes` is a root-to-node path of the batch with these parents."""
    if parents is None:
        raise ValueError("commit without a forward pass")
    parent = ROOT
    for node in nodes:
        if not 0 <= node < len(parents) or int(parents[node]) != parent:
            raise ValueError(f"{tuple(nodes)} is not a path of the last batch")
        parent = node
