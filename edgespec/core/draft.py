"""What a drafter hands over: a tree of guessed tokens in parent-array form. A chain is a tree.

    committed …  t      node   token  parent
                 ├─ a      0      a    ROOT
                 │  └─ c   2      c       0
                 └─ b      1      b    ROOT

Depths, paths and the ancestor mask are derived, never carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgespec.core.scores import Int32, LogProbs

ROOT = -1  # parent of every node that directly follows the last committed token


def check_parents(parents: Int32, n: int) -> None:
    """Raise ValueError unless `parents` [n] is a forest with parents before children."""
    if parents is chain_parents(n):
        return
    if parents.shape != (n,):
        raise ValueError(f"tree arrays disagree: {n} tokens, parents {parents.shape}")
    if np.any(parents >= np.arange(n)) or np.any(parents < ROOT):
        raise ValueError(f"parents must come before their children and be >= {ROOT}: {parents.tolist()}")


@lru_cache(maxsize=1024)
def chain_parents(n: int) -> Int32:
    """int32 [n], read-only: every node follows the one before it. Chains are most of all drafts, so each length is made once."""
    parents = np.arange(-1, n - 1, dtype=np.int32)
    parents.setflags(write=False)
    return parents


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens agree, compared one by one."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def is_chain(parents: Int32) -> bool:
    return parents is chain_parents(len(parents)) or bool(np.array_equal(parents, chain_parents(len(parents))))


def path_to(parents: Int32, node: int) -> list[int]:
    """Nodes from the root down to `node`, inclusive; empty for ROOT."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def depths(parents: Int32) -> Int32:
    """int32 [n]: 0 for a node that follows the last committed token."""
    out = np.zeros(len(parents), np.int32)
    for i, parent in enumerate(parents.tolist()):
        out[i] = 0 if parent == ROOT else out[parent] + 1
    return out


def ancestor_mask(parents: Int32) -> NDArray[np.bool_]:
    """bool [n, n]: mask[i, j] says that node i sees node j (itself or an ancestor)."""
    n = len(parents)
    mask = np.zeros((n, n), np.bool_)
    for i, parent in enumerate(parents.tolist()):
        if parent != ROOT:
            mask[i] = mask[parent]
        mask[i, i] = True
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """`token_ids` int32 [n], `parents` int32 [n], `context_len` tokens known when it was made.

    `q` [n, V or hot] is the law each node was really drawn from, after temperature, filters and penalties;
    None marks fixed guesses (q is a point mass on the guess).
    """

    token_ids: Int32
    parents: Int32
    context_len: int
    q: LogProbs | None = None
    source: str = ""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        check_parents(self.parents, n)
        if self.q is not None and len(self.q.values) != n:
            raise ValueError(f"draft arrays disagree: {n} tokens, q {self.q.values.shape}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def chain(cls, token_ids: Sequence[int] | Int32, *, context_len: int, q: LogProbs | None = None, source: str = "") -> Self:
        ids = np.asarray(token_ids, np.int32)
        return cls(ids, chain_parents(len(ids)), context_len, q, source)

    @classmethod
    def empty(cls, *, context_len: int, source: str = "") -> Self:
        return cls.chain((), context_len=context_len, source=source)

    def children(self, node: int) -> list[int]:
        if self.parents is chain_parents(len(self.parents)):
            return [node + 1] if node + 1 < len(self.parents) else []
        return np.flatnonzero(self.parents == node).tolist()
