"""Toy engines whose logits are a plain function of the tokens read, so that a wrong cache shows as a wrong list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft, path_to
from edgespec.core.drafter import Offer
from edgespec.core.engine import Capabilities, ModelSpec, Scores, TokenBatch, check_batch, check_path
from edgespec.core.placement import Placement
from edgespec.core.sampling import Sampling
from edgespec.core.scores import Float32, HostLogits
from edgespec.core.verdict import Outcome

FIXED_TARGET = np.array([2.0, 1.0, 0.5, 0.0], np.float32)
FIXED_DRAFT = np.array([0.5, 2.0, 1.0, 0.8], np.float32)


class ToyCache:
    """The cache is the list of tokens read."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: list[int] = []
        self.pending: TokenBatch | None = None
        self.host_bytes_copied = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return 4 * len(self.tokens)

    def commit(self, nodes: Sequence[int]) -> None:
        check_path(nodes, None if self.pending is None else self.pending.parents)
        assert self.pending is not None
        self.tokens += [int(self.pending.token_ids[node]) for node in nodes]
        self.pending = None

    def truncate(self, length: int) -> None:
        if length > len(self.tokens):
            raise ValueError(f"cannot keep {length} of {len(self.tokens)} tokens")
        del self.tokens[length:]
        self.pending = None


class ToyEngine:
    """`law(tokens) -> logits [rows]`; only the first `vocab_size` of them leave the engine. Counts its work."""

    def __init__(
        self, law: Callable[[list[int]], Float32], *, vocab_size: int, max_context: int = 4096, digest: str = "toy", name: str = "toy"
    ) -> None:
        self.law = law
        self.spec = ModelSpec(
            name=name,
            vocab_size=vocab_size,
            vocab_digest="toy",
            max_context=max_context,
            layers=1,
            hidden=1,
            weight_bytes=0,
            kv_bytes_per_token=4,
        )
        self.capabilities = Capabilities(width_invariant=True)
        self.forwards = 0
        self.rows = 0
        self.deepest = 0  # most tokens any row has ever seen, itself included
        self.closed = False

    def placement(self) -> Placement:
        return Placement.whole("cpu", 1, by="Python", source="toys run nowhere else")

    def new_cache(self, capacity: int) -> ToyCache:
        if capacity > self.spec.max_context:
            raise ValueError(f"capacity {capacity} exceeds the context of {self.spec.max_context}")
        return ToyCache(capacity)

    def forward(
        self, work: Sequence[tuple[TokenBatch, ToyCache]], *, features: bool = False, cancel: CancelToken | None = None
    ) -> list[Scores]:
        if cancel is not None:
            cancel.check()
        out: list[Scores] = []
        for batch, cache in work:
            check_batch(batch, cache, self.spec, self.capabilities)
            self.forwards += 1
            self.rows += len(batch)
            cache.pending = batch
            rows: list[Float32] = []
            for i in range(len(batch)):
                seen = cache.tokens + [int(batch.token_ids[j]) for j in path_to(batch.parents, i)]
                self.deepest = max(self.deepest, len(seen))
                if i >= len(batch) - batch.n_scored:
                    rows.append(self.law(seen)[: self.spec.vocab_size])
            width = self.spec.vocab_size
            out.append(Scores(HostLogits(np.stack(rows) if rows else np.empty((0, width), np.float32))))
        return out

    def close(self) -> None:
        self.closed = True


def hashed_logits(tokens: Sequence[int], seed: int, width: int) -> Float32:
    """A fixed law of the last 6 tokens."""
    state = np.uint64(seed * 2 + 1)
    with np.errstate(over="ignore"):
        for token in tokens[-6:]:
            state = (state ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)
            state ^= state >> np.uint64(29)
    return (np.random.default_rng(int(state)).normal(size=width) * 2).astype(np.float32)


def toy_lm(seed: int = 0, *, vocab_size: int = 16, rows: int | None = None, max_context: int = 4096, eos: int | None = None) -> ToyEngine:
    """ToyLM of the field reports. `rows` > vocab_size pads the output with tempting logits; without `eos` it never ends."""
    width = rows or vocab_size

    def law(tokens: list[int]) -> Float32:
        logits = np.full(width, 50.0, np.float32)
        logits[:vocab_size] = hashed_logits(tokens, seed, vocab_size)
        if eos is None:
            logits[15 : min(16, vocab_size)] = -50.0
        return logits

    return ToyEngine(law, vocab_size=vocab_size, max_context=max_context)


def toy_draft(seed: int = 0, *, vocab_size: int = 16, share: float = 0.8, max_context: int = 4096) -> ToyEngine:
    """The target's hash mixed `share` with noise of its own."""

    def law(tokens: list[int]) -> Float32:
        logits = share * hashed_logits(tokens, seed, vocab_size) + (1 - share) * 4 * hashed_logits(tokens, seed + 77, vocab_size)
        logits[15:16] = -50.0
        return logits.astype(np.float32)

    return ToyEngine(law, vocab_size=vocab_size, max_context=max_context)


def fixed_dist(logits: Float32, *, rows: int | None = None) -> ToyEngine:
    """The same logits whatever the prefix."""
    padded = np.concatenate([logits, np.full((rows or len(logits)) - len(logits), 50.0, np.float32)])
    return ToyEngine(lambda tokens: padded, vocab_size=len(logits))


class AdversaryDrafter:
    """Any tree at all, guesses unrelated to the target."""

    name = "adversary"
    engine_ms = 0.0
    wants_features = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.known = vocab_size, 0

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        self.known = len(prompt_ids)

    def offer(self, max_tokens: int) -> Offer:
        return Offer(self.name)

    def next_entropy(self) -> float | None:
        return None

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        n = int(rng.integers(0, max_tokens + 1))
        parents = np.array([int(rng.integers(-1, i)) for i in range(n)], np.int32)
        return Draft(rng.integers(0, self.vocab_size, n).astype(np.int32), parents, self.known, source=self.name)

    def observe(self, outcome: Outcome) -> None:
        self.known += len(outcome.verdict.kept) + 1

    def close(self) -> None:
        pass


class TreeDrafter:
    """A tree whose siblings are drawn independently from one law that has nothing to do with the target."""

    name = "tree"
    engine_ms = 0.0
    wants_features = False

    def __init__(self, engine: ToyEngine, *, width: int = 2) -> None:
        self.engine, self.width = engine, width
        self.known: list[int] = []
        self.sampling = Sampling()

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        self.known, self.sampling = list(prompt_ids), sampling

    def offer(self, max_tokens: int) -> Offer:
        return Offer(self.name)

    def next_entropy(self) -> float | None:
        return None

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        from edgespec.core.sampling import SamplingState, draw
        from edgespec.core.scores import LogProbs

        state = SamplingState.after(self.sampling, self.known)
        tokens, parents, laws = list[int](), list[int](), list[Float32]()
        frontier = [(-1, list[int]())]
        while len(tokens) < max_tokens and frontier:
            parent, path = frontier.pop(0)
            law = state.law(self.engine.law(self.known + path)[: self.engine.spec.vocab_size], path)
            for _ in range(min(self.width, max_tokens - len(tokens))):
                tokens.append(draw(np.exp(law.astype(np.float64)), rng))
                parents.append(parent)
                laws.append(law)
                frontier.append((len(tokens) - 1, [*path, tokens[-1]]))
        q = LogProbs(np.stack(laws)) if laws else None
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), len(self.known), q, self.name)

    def observe(self, outcome: Outcome) -> None:
        self.known += outcome.verdict.tokens(outcome.draft)

    def close(self) -> None:
        pass
