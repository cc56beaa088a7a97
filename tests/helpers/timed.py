"""Engines whose passes take the time a test says, on a clock that only they move; and profiles made without measuring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from edgespec.core.cancel import CancelToken
from edgespec.core.device import UnitProfile
from edgespec.core.engine import Scores, TokenBatch
from edgespec.orchestrator.runtime import Runtime
from edgespec_device_profiles.measured import Answer, DraftCost, Kind, Machine, Measured, Model
from tests.helpers.fake_runtime import ASSISTANT, USER, VOCAB, ByteTokenizer, law
from tests.helpers.toys import ToyCache, ToyEngine


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def advance(self, ms: float) -> None:
        """From any thread."""
        with self._lock:
            self.now += ms / 1e3

    def __call__(self) -> float:
        return self.now


class TimedEngine(ToyEngine):
    """`cost_ms(rows, context)` passes on the clock with each pass; `log` keeps (rows, context) of the scored ones."""

    def __init__(self, clock: Clock, cost_ms: Callable[[int, int], float], **options: Any) -> None:
        super().__init__(law, vocab_size=VOCAB, max_context=600, **options)
        self.clock, self.cost_ms = clock, cost_ms
        self.log: list[tuple[int, int]] = []

    def forward(
        self, work: Sequence[tuple[TokenBatch, ToyCache]], *, features: bool = False, cancel: CancelToken | None = None
    ) -> list[Scores]:
        [(batch, cache)] = work
        scores = super().forward(work, features=features, cancel=cancel)
        if batch.n_scored:
            self.log.append((len(batch), cache.length))
            self.clock.advance(self.cost_ms(len(batch), cache.length))
        return scores


def timed_runtime(
    clock: Clock,
    cost_ms: Callable[[int, int], float] = lambda rows, context: 10.0 + rows,
    *,
    draft: TimedEngine | None = None,
    meter_mj: Callable[[], float] | None = None,
) -> Runtime:
    """Answers as the fake runtime does, with n-grams or a draft engine."""
    tokenizer: Any = ByteTokenizer()
    target = TimedEngine(clock, cost_ms)
    return Runtime(target, tokenizer, draft="small" if draft else "ngram", draft_engine=draft, engine_name="toy", meter_mj=meter_mj)


def prompt(text: str) -> list[int]:
    return [USER, *text.encode(), ASSISTANT]


MACHINE = Machine(name="toy-2-cores", processor="Toy", cores=2)


def example(**changes: Any) -> Measured:
    """A whole profile: a pass costs 9 + rows ms at context 64 and twice that at 512; code is guessed well, chat badly."""
    forward = {rows: {64: 9.0 + rows, 512: 2 * (9.0 + rows)} for rows in (1, 2, 4, 8)}
    code = Kind(rounds=100, offered=(100,) * 7, tested=(100, 80, 64, 51, 41, 33, 26), kept=(80, 64, 51, 41, 33, 26, 21), context=64.0)
    chat = Kind(rounds=100, offered=(100,) * 7, tested=(100, 5, 1, 0, 0, 0, 0), kept=(5, 1, 0, 0, 0, 0, 0), context=64.0)
    answers = [
        Answer(at_s=float(t), kind=kind, mode=mode, tok_s=tok_s)
        for t in range(6)
        for kind in ("code", "chat")
        for mode, tok_s in (("plain", 100.0), ("speculative", 200.0 if kind == "code" else 99.0))
    ]
    figures: dict[str, Any] = {
        "date": "2026-01-02T03:04:05+00:00",
        "complete": True,
        "machine": MACHINE,
        "model": Model(name="tiny", engine="toy", unit="cpu", weight_bytes=100_000_000, kv_bytes_per_token=1000),
        "draft": DraftCost(name="ngram", ms_per_token=0.0, miss_ms=0.0),
        "policy": "adaptive",
        "units": {"cpu": UnitProfile(bandwidth_gbs=20.0, forward_ms=forward, forward_p95_ms=forward, dispatch_floor_ms=1.0)},
        "other_ms": 0.0,
        "prediction_error": 0.1,
        "kinds": {"code": code, "chat": chat},
        "sustained": tuple(answers),
        "not_measured": {"energy": "no meter"},
    }
    return Measured(**figures | changes)
