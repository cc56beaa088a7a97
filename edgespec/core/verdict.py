"""What the target decided about one draft, and what everyone is told afterwards."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.core.draft import Draft

Kind = Literal["correction", "bonus", "plain", "stop"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kept` is a root-to-node path of the draft; `next_token` follows it and comes from the target itself.

    `kind`: correction replaces a refused guess, bonus follows a leaf, plain follows an empty draft, stop is a
    kept guess that ends the answer (it is emitted, never fed).
    """

    kept: tuple[int, ...]
    next_token: int
    kind: Kind

    def tokens(self, draft: Draft) -> list[int]:
        """The tokens this round adds, in order."""
        return [int(draft.token_ids[node]) for node in self.kept] + [self.next_token]

    def until(self, stop_ids: Set[int], draft: Draft) -> Verdict:
        """This verdict cut after its first stop id, so that nothing behind it is kept anywhere."""
        for i, node in enumerate(self.kept):
            token = int(draft.token_ids[node])
            if token in stop_ids:
                return Verdict(self.kept[:i], token, "stop")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The one argument of `Drafter.observe`.

    `features`: the target's hidden states of the round's rows, [1 + n, D…] (row 0 read the last committed token, row
    i + 1 read draft node i), or None when nobody asked for them. Valid until the next forward pass.
    """

    draft: Draft
    verdict: Verdict
    features: Any = None
