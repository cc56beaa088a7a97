"""Who may guess: what `draft` names, what is loaded for it, and who takes over when a draft cannot run."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.core.device import DeviceProfile
from edgespec.core.errors import CapabilityError, DeviceError
from edgespec.core.sampling import Sampling
from edgespec.drafting.ahead import THREAD_NAME
from edgespec.orchestrator import engines, runtime
from edgespec.orchestrator.runtime import Runtime, drafts_of, load
from edgespec.orchestrator.store import Package
from edgespec.orchestrator.tokenizer import Tokenizer
from tests.helpers.stored import write_package
from tests.helpers.toyloop import Always
from tests.helpers.toys import ToyEngine, toy_draft, toy_lm
from tests.helpers.toytext import letter_tokenizer, toy_runtime

LONG = [t % 5 for t in range(40)]


@pytest.mark.parametrize(
    ("text", "names"), [("none", ("none",)), ("ngram", ("ngram",)), ("small", ("small",)), ("small, ngram", ("small", "ngram"))]
)
def test_what_draft_may_name(text: str, names: tuple[str, ...]) -> None:
    assert drafts_of(text) == names


@pytest.mark.parametrize("text", ["", "ngram,", "ngram,ngram", "none,ngram", "small,large", "small,large,ngram"])
def test_what_it_may_not(text: str) -> None:
    with pytest.raises(ValueError, match="draft must be none, ngram, a model"):
        drafts_of(text)


def test_names_and_engines_must_fit() -> None:
    for draft, engine in [("ngram", toy_draft(1)), ("small", None), ("small,ngram", None)]:
        with pytest.raises(ValueError, match="do not fit"):
            toy_runtime(toy_lm(1), draft=draft, draft_engine=engine)


def test_vocabularies_of_other_sizes_do_not_fit_whatever_their_digests_say() -> None:
    """One id too many would be drafted, and one too few could not be read."""
    for size in (15, 17):
        with pytest.raises(CapabilityError, match=f"vocabularies differ .{size} and 16 tokens"):
            toy_runtime(toy_lm(1), draft="small", draft_engine=toy_draft(1, vocab_size=size))


def test_a_session_may_use_some_of_the_drafts() -> None:
    with toy_runtime(toy_lm(2), draft="small,ngram", draft_engine=toy_lm(2)) as both:
        offered = {
            draft: {offer.drafter for t in both.session(draft=draft).generate(LONG, max_tokens=9).traces for offer in t.offers}
            for draft in (None, "small", "ngram")
        }
        assert offered == {None: {"model", "ngram"}, "small": {"model"}, "ngram": {"ngram"}}
        again = both.session(draft="ngram").another().generate(LONG, max_tokens=9).traces
        assert {offer.drafter for t in again for offer in t.offers} == {"ngram"}
        with pytest.raises(ValueError, match="'large' was not loaded; this model was opened with small,ngram"):
            both.session(draft="large")


@pytest.mark.parametrize("verify", ["greedy", "match", "rejection"])
def test_two_drafters_change_no_answer(verify: str) -> None:
    plain = toy_runtime(toy_lm(2), draft="none").session().generate(LONG, max_tokens=40).token_ids
    for policy in ("adaptive", "fixed:3", "window", "entropy"):
        session = toy_runtime(toy_lm(2), draft="small,ngram", draft_engine=toy_draft(2)).session(policy=policy, verify=verify)
        assert session.generate(LONG, max_tokens=40).token_ids == plain


class _Store:
    """Two packages that are "installed", and the engines that their artifacts become."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: ToyEngine) -> None:
        big = replace(write_package(tmp_path / "big", "big"), draft="small")
        packages = {"big": Package(tmp_path / "big", big), "small": Package(tmp_path / "small", write_package(tmp_path / "small", "small"))}
        toys = {"big": toy_lm(3), "small": draft}
        self.draft = draft
        monkeypatch.setattr(runtime, "find_package", packages.__getitem__)
        monkeypatch.setattr(engines, "load", lambda package, **_: (toys[package.manifest.name], "toy"))
        monkeypatch.setattr(Tokenizer, "load", staticmethod(lambda *_: letter_tokenizer()))

    @staticmethod
    def answer(opened: Runtime) -> tuple[int, ...]:
        with opened:
            return opened.session(policy="fixed:3").generate(LONG, max_tokens=20).token_ids


PLAIN = toy_runtime(toy_lm(3), draft="none").session().generate(LONG, max_tokens=20).token_ids


@pytest.mark.parametrize(
    ("draft", "name"), [("auto", "small,ngram"), ("small", "small"), ("ngram,small", "ngram,small"), ("ngram", "ngram"), ("none", "none")]
)
def test_load_takes_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: str, name: str) -> None:
    store = _Store(tmp_path, monkeypatch, toy_draft(3))
    opened = load("big", draft=draft)
    assert opened.draft_name == name and opened.notes == ()
    assert (opened.draft_engine is store.draft) is ("small" in name)
    assert store.answer(opened) == PLAIN


def test_esb_52_a_draft_that_fails_at_its_first_pass_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = toy_draft(3)

    def broken(*_: object, **__: object) -> None:
        raise DeviceError("the driver rejects the graph")

    monkeypatch.setattr(draft, "forward", broken)
    store = _Store(tmp_path, monkeypatch, draft)
    opened = load("big")
    assert opened.draft_name == "ngram" and opened.draft_engine is None
    assert "small loads but does not run (the driver rejects the graph)" in opened.notes[0]
    assert store.answer(opened) == PLAIN


def test_esb_52_a_draft_that_fails_later_is_left_out_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = toy_draft(3)
    forward, passes = draft.forward, 0

    def fails_late(*arguments, **options):  # type: ignore[no-untyped-def]
        nonlocal passes
        passes += 1
        if passes >= 6:
            raise DeviceError("the driver is gone")
        return forward(*arguments, **options)

    monkeypatch.setattr(draft, "forward", fails_late)
    store = _Store(tmp_path, monkeypatch, draft)
    with load("big") as opened:
        answer = opened.session(policy="fixed:3").generate(LONG, max_tokens=20)
    assert answer.token_ids == PLAIN == store.answer(load("big", draft="none"))
    assert any("the driver is gone" in fault for t in answer.traces for fault in t.faults)
    assert answer.traces[-1].offers and {offer.drafter for offer in answer.traces[-1].offers} == {"ngram"}


def test_random_failures_of_a_draft_never_change_an_answer() -> None:
    for seed in range(8):
        rng, draft = np.random.default_rng(seed), toy_draft(3)
        forward = draft.forward

        def shaky(*arguments, rng=rng, forward=forward, **options):  # type: ignore[no-untyped-def]
            if rng.random() < 0.2:
                raise DeviceError("now and then")
            return forward(*arguments, **options)

        draft.forward = shaky  # type: ignore[method-assign]
        session = toy_runtime(toy_lm(3), draft="small,ngram", draft_engine=draft).session(policy="adaptive")
        for _ in range(3):
            assert session.generate(LONG, max_tokens=20).token_ids == PLAIN


def on_unit(engine: ToyEngine, unit: str) -> ToyEngine:
    engine.capabilities = replace(engine.capabilities, unit=unit)
    return engine


@pytest.mark.parametrize(
    ("unit", "penalty", "estimated", "can"),
    [
        ("cpu", None, False, False),
        ("npu", None, False, True),
        ("cpu", 1.5, False, True),
        ("cpu", 1.0, True, False),
        ("npu", 1.0, True, True),
    ],
    ids=["one unit", "two units", "measured on one", "estimated for two", "estimated, and two there are"],
)
def test_who_can_draft_ahead(unit: str, penalty: float | None, estimated: bool, can: bool) -> None:
    profile = DeviceProfile(chip="x", overlap_penalty=penalty, estimated=estimated)
    engine = on_unit(toy_draft(3), unit)
    with Runtime(toy_lm(3), letter_tokenizer(), draft="small,ngram", draft_engine=engine, profile=profile) as opened:
        pool = opened.new_drafters(64)
        pool.start(LONG, sampling=Sampling())
        assert {offer.drafter: offer.ahead for offer in pool.offers(4)} == {"model": can, "ngram": False}


@pytest.mark.parametrize("verify", ["greedy", "match", "rejection"])
def test_drafting_ahead_changes_no_answer_and_leaves_no_thread(verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.orchestrator.runtime.parse_policy", lambda _: Always(3))
    before = set(threading.enumerate())
    profile = DeviceProfile(chip="x", overlap_penalty=1.0)
    with Runtime(toy_lm(3), letter_tokenizer(), draft="small", draft_engine=toy_lm(3), profile=profile) as opened:
        with opened.session(verify=verify) as first, first.another() as second:
            answers = [session.generate(LONG, max_tokens=20) for session in (first, second, first)]
            assert any(thread.name == THREAD_NAME for thread in set(threading.enumerate()) - before)
        assert set(threading.enumerate()) <= before
    assert {answer.token_ids for answer in answers} == {PLAIN}
    assert all(sum(t.predrafted for t in answer.traces) > 0 for answer in answers)


def test_packages_whose_vocabularies_differ_in_size_are_refused_before_the_draft_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Store(tmp_path, monkeypatch, toy_draft(3))
    find = runtime.find_package
    small = find("small")
    tokenizer = replace(small.manifest.tokenizer, stop_ids=(0,))
    shorter = replace(small, manifest=replace(small.manifest, tokenizer=tokenizer, vocab_size=small.manifest.vocab_size - 1))
    monkeypatch.setattr(runtime, "find_package", lambda name: shorter if name == "small" else find(name))
    loaded = list[str]()
    target = toy_lm(3)
    monkeypatch.setattr(engines, "load", lambda package, **_: (loaded.append(package.manifest.name), (target, "toy"))[1])
    with pytest.raises(CapabilityError, match="small cannot draft for big: their vocabularies differ"):
        load("big")
    assert loaded == ["big"] and target.closed
