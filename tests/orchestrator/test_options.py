"""An option is never dropped in silence: what a session or a load cannot honour is refused at the door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

import edgespec
from edgespec.core.errors import CapabilityError
from edgespec.core.plan import Knobs
from edgespec.core.sampling import Sampling
from edgespec.orchestrator import session as session_module
from edgespec.verification.match import MatchVerifier
from tests.helpers.toys import toy_lm
from tests.helpers.toytext import letter_tokenizer, toy_runtime

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}<e>"


@pytest.mark.parametrize(
    ("knobs", "policy", "message"),
    [
        (Knobs(energy="saver"), "fixed:4", "energy 'saver' says how to plan"),
        (Knobs(energy="fast"), "fixed:0", "energy 'fast' says how to plan"),
        (Knobs(target_ms_per_token=20.0), "window", "policy 'window' does not know target_ms_per_token"),
        (Knobs(target_ms_per_token=20.0), "fixed:4", "does not know target_ms_per_token"),
    ],
)
def test_limits_that_nothing_acts_on_are_refused(knobs: Knobs, policy: str, message: str) -> None:
    with pytest.raises(CapabilityError, match=message):
        toy_runtime(toy_lm(1)).session(policy=policy, knobs=knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"energy": "low"}, "energy must be fast, balanced, saver; got 'low'"),
        ({"max_draft_tokens": 2.5}, "a whole number"),
        ({"max_draft_tokens": -1}, "a whole number >= 0"),
        ({"target_ms_per_token": float("nan")}, "must be > 0"),
        ({"min_battery": float("nan")}, "between 0 and 1"),
    ],
)
def test_limits_that_make_no_sense_are_refused_where_they_are_made(knobs: dict[str, Any], message: str) -> None:
    """Not in the middle of an answer, by the policy that trips over them."""
    with pytest.raises(ValueError, match=message):
        Knobs(**knobs)


def test_a_pace_is_taken_by_the_policy_that_knows_it() -> None:
    session = toy_runtime(toy_lm(1)).session(policy="adaptive", knobs=Knobs(target_ms_per_token=20.0))
    assert session.generate("abc", max_tokens=3).stats.tokens == 3


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([{"role": "user", "content": "a"}], {"raw": True}, "messages need the chat template that raw leaves out"),
        ([{"role": "user", "content": "a"}, 3], {}, "all messages or all token ids"),
        ("a", {"sampling": Sampling(bias={3: 1.0, 16: 5.0})}, r"bias needs token ids below 16, got \[16\]"),
        ("a", {"stop": "end"}, "stop must be a list of strings, got the string 'end'"),
    ],
)
def test_arguments_that_would_be_misread_are_refused(prompt: object, options: Mapping[str, object], message: str) -> None:
    target = toy_lm(1)
    session = toy_runtime(target, tokenizer=letter_tokenizer(template=CHAT)).session()
    with pytest.raises(ValueError, match=message):
        session.stream(prompt, **options)  # type: ignore[arg-type]
    assert target.forwards == 0


# Each one changes what this prompt and seed give; at temperature 0 the likeliest token survives every filter, by definition.
CHANGED = Sampling(temperature=1.5, seed=3)


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_p": 0.2},
        {"min_p": 0.5},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 4.0},
        {"frequency_penalty": 4.0},
        {"bias": {3: 30.0}},
        {"seed": 4},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_sampling_option_changes_the_answer(changed: dict[str, object]) -> None:
    values = {"temperature": CHANGED.temperature, "seed": CHANGED.seed} | changed
    session = toy_runtime(toy_lm(2), draft="none").session()
    plain = session.generate("abc", max_tokens=40, sampling=CHANGED)
    assert session.generate("abc", max_tokens=40, sampling=Sampling(**values)).token_ids != plain.token_ids  # type: ignore[arg-type]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_k": 5}, {"top_p": 0.1}, {"min_p": 0.9}, {"seed": 9}])
def test_at_temperature_0_filters_and_seeds_leave_the_likeliest_token(filters: dict[str, object]) -> None:
    session = toy_runtime(toy_lm(2), draft="none").session()
    plain = session.generate("abc", max_tokens=20).token_ids
    assert session.generate("abc", max_tokens=20, sampling=Sampling(**filters)).token_ids == plain  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [0, -2])
def test_no_threads_at_all_are_refused_before_the_model_is_looked_for(threads: int) -> None:
    with pytest.raises(ValueError, match="threads must be >= 1"):
        edgespec.load("nowhere", threads=threads)


def test_a_rule_that_is_not_lossless_needs_the_users_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Biased(MatchVerifier):
        name: str = "biased"
        lossless: bool = False

    monkeypatch.setitem(session_module._VERIFIERS, "match", Biased)  # type: ignore[arg-type]
    runtime = toy_runtime(toy_lm(1))
    with pytest.raises(CapabilityError, match="'biased' is not lossless"):
        runtime.session(verify="match").stream("abc")
    assert runtime.session(verify="match", knobs=Knobs(lossless=False)).generate("abc", max_tokens=3).stats.tokens == 3
