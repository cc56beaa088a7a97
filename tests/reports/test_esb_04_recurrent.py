"""ESB-04: recurrent and hybrid models. Their weights are refused at conversion; an engine with a state of its own must take it back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import path_to
from edgespec.core.engine import Capabilities, Scores, TokenBatch, check_batch, check_path
from edgespec.core.errors import ContractError
from edgespec.core.sampling import Sampling
from edgespec.core.scores import Float32, HostLogits
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.none import NoDrafter
from edgespec.orchestrator.loop import decode, prefill
from tests.helpers.command import edgespec
from tests.helpers.hostile import WrongEverySecondRound
from tests.helpers.tiny import hf_config, tiny_config, tiny_tensors, write_gguf, write_hf
from tests.helpers.toyloop import Always, parts_for, run_ids, run_rounds
from tests.helpers.toys import ToyEngine, TreeDrafter, hashed_logits


class StateCache:
    """Keeps one number per token read, s ← 0.5·s + x: what a recurrent layer would carry. `commit` picks the state to go on from."""

    host_bytes_copied = 0

    def __init__(self, capacity: int, start: float) -> None:
        self.capacity, self.states = capacity, [start]
        self.pending: tuple[TokenBatch, list[float]] | None = None

    @property
    def length(self) -> int:
        return len(self.states) - 1

    @property
    def nbytes(self) -> int:
        return 8 * len(self.states)

    def read(self, batch: TokenBatch) -> list[float]:
        """The state after each row, from its parent's."""
        after: list[float] = []
        for token, parent in zip(batch.token_ids.tolist(), batch.parents.tolist(), strict=True):
            after.append(0.5 * (self.states[-1] if parent < 0 else after[parent]) + token)
        self.pending = batch, after
        return after

    def commit(self, nodes: Sequence[int]) -> None:
        check_path(nodes, None if self.pending is None else self.pending[0].parents)
        assert self.pending is not None
        self.states += [self.pending[1][node] for node in nodes]
        self.pending = None

    def truncate(self, length: int) -> None:
        if length > self.length:
            raise ValueError(f"cannot keep {length} of {self.length} tokens")
        del self.states[length + 1 :]


class ForgetfulCache(StateCache):
    """The fault of the reports: the state has moved on with the block, and refusing it takes nothing back."""

    def commit(self, nodes: Sequence[int]) -> None:
        assert self.pending is not None
        super().commit(path_to(self.pending[0].parents, len(self.pending[0]) - 1))


class StateEngine(ToyEngine):
    """Logits are a hash of the state alone."""

    cache_type: type[StateCache] = StateCache

    def __init__(self, *, start: float = 0.0) -> None:
        super().__init__(lambda tokens: np.zeros(16, np.float32), vocab_size=16)
        self.capabilities = Capabilities(rollback="tail", width_invariant=True)
        self.start = start

    def new_cache(self, capacity: int) -> StateCache:  # type: ignore[override]
        return self.cache_type(capacity, self.start)

    def forward(self, work: Any, *, features: bool = False, cancel: CancelToken | None = None) -> list[Scores]:
        out: list[Scores] = []
        for batch, cache in work:
            check_batch(batch, cache, self.spec, self.capabilities)
            states = cache.read(batch)[len(batch) - batch.n_scored :]
            rows: list[Float32] = [hashed_logits([round(1000 * s) % (1 << 40)], 3, 16) for s in states]
            out.append(Scores(HostLogits(np.stack(rows) if rows else np.empty((0, 16), np.float32))))
        return out


def test_esb_04_a_refused_block_leaves_the_state_after_the_accepted_token() -> None:
    cache = StateEngine(start=4.0).new_cache(8)
    cache.read(TokenBatch.chain([1, 2, 3]))
    cache.commit([0])
    assert cache.states[-1] == 3.0
    cache.read(TokenBatch.chain([2, 3]))
    cache.commit([0, 1])
    assert cache.states[-1] == 4.75


@pytest.mark.parametrize("k", [1, 3, 8])
def test_esb_04_rounds_with_drafts_and_without_alternate_exactly(k: int) -> None:
    plain = run_ids(StateEngine(), NoDrafter(), [1, 2, 3], n=60, k=0)
    assert len(set(plain)) > 3
    assert run_ids(StateEngine(), WrongEverySecondRound(ModelDrafter(StateEngine()), 16), [1, 2, 3], n=60, k=k) == plain

    class Alternating(Always):
        def __call__(self, history: Any, state: Any, profile: Any, knobs: Any) -> Any:
            return super().__call__(history, state, profile, knobs) if len(history) % 2 else Always(0)(history, state, profile, knobs)

    parts = replace(parts_for(StateEngine(), ModelDrafter(StateEngine()), [1, 2, 3], k=k), policy=Alternating(k))
    prefill(parts, [1, 2, 3])
    assert [t for round in decode(parts, 3, max_tokens=60, stop_ids=frozenset()) for t in round.token_ids] == plain


def test_esb_04_a_cache_that_takes_nothing_back_is_caught() -> None:
    class Forgetful(StateEngine):
        cache_type = ForgetfulCache

    with pytest.raises(ContractError):
        run_rounds(Forgetful(), WrongEverySecondRound(ModelDrafter(StateEngine()), 16), [1, 2, 3], n=60, k=4)


def test_esb_04_an_engine_that_takes_back_tails_only_is_given_no_trees() -> None:
    trees = TreeDrafter(ToyEngine(lambda tokens: np.zeros(16, np.float32), vocab_size=16))
    with pytest.raises(ValueError, match="scores chains only"):
        run_rounds(StateEngine(), trees, [1, 2, 3], n=10, k=4, sampling=Sampling(temperature=1.0))


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "jamba", "qwen3_next", "rwkv", "recurrent_gemma", "lfm2", "falcon_h1"])
def test_esb_04_recurrent_folders_are_refused_at_conversion(model_type: str, tmp_path: Path) -> None:
    config = tiny_config("llama", layers=1)
    folder = write_hf(tmp_path / "model", config, tiny_tensors(config))
    (folder / "config.json").write_text(json.dumps(hf_config(config) | {"model_type": model_type}))
    result = edgespec("convert", str(folder), home=tmp_path / "home")
    assert result.code == 1
    assert f"model_type '{model_type}' is not supported; supported: llama, qwen2, qwen3, gemma3" in result.error()


@pytest.mark.parametrize("architecture", ["mamba", "jamba", "qwen3next", "rwkv7", "lfm2", "falcon-h1"])
def test_esb_04_recurrent_gguf_files_are_refused_at_conversion(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama", layers=1)
    add_name = gguf.GGUFWriter.add_name

    def add(self: gguf.GGUFWriter, name: str) -> None:
        self.kv_data[0]["general.architecture"] = gguf.GGUFValue(architecture, gguf.GGUFValueType.STRING)
        add_name(self, name)

    monkeypatch.setattr(gguf.GGUFWriter, "add_name", add)
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config))
    result = edgespec("convert", str(path), home=tmp_path / "home")
    assert result.code == 1
    assert f"architecture '{architecture}' is not supported; supported: llama, qwen2, qwen3, gemma3" in result.error()
