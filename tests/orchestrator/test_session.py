"""Sessions on toy parts: text, limits, cancelling, several conversations over one model."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from edgespec.core.cancel import CancelToken
from edgespec.core.device import DeviceProfile, PowerThermalState, UnitProfile
from edgespec.core.errors import CapabilityError, ContextLengthError
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import RoundState
from edgespec.core.sampling import Sampling
from edgespec.core.trace import RoundTrace
from edgespec.drafting.ngram import NgramDrafter
from edgespec.orchestrator import session as session_module
from edgespec.orchestrator.loop import decode, prefill
from edgespec.orchestrator.runtime import Runtime
from edgespec.orchestrator.session import Session
from edgespec.scheduling import adaptive
from edgespec.scheduling.fixed import FixedPolicy
from edgespec.scheduling.governor import Governor
from edgespec.scheduling.memory import Memory
from edgespec.scheduling.sensors import Reading, Sensors
from tests.helpers.toyloop import parts_for
from tests.helpers.toys import ToyEngine, toy_draft, toy_lm
from tests.helpers.toytext import LETTERS, letter_tokenizer, toy_runtime

CHAT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}<e>"


def scripted(answer: Sequence[int], prompt_len: int) -> ToyEngine:
    """Greedily answers `answer`, then the stop id."""

    def law(tokens: list[int]) -> np.ndarray:
        i = len(tokens) - prompt_len
        logits = np.zeros(16, np.float32)
        logits[answer[i] if 0 <= i < len(answer) else 15] = 5.0
        return logits

    return ToyEngine(law, vocab_size=16)


def with_self_draft(make, **options) -> Runtime:  # type: ignore[no-untyped-def]
    return toy_runtime(make(), draft="itself", draft_engine=make(), **options)


@pytest.mark.parametrize("k", [0, 1, 8])
def test_esb_02_text_ids_chunks_and_cache_end_at_the_stop(k: int) -> None:
    for stop in range(13):
        tokenizer = letter_tokenizer(stop_ids=(stop, 15))
        plain = toy_runtime(toy_lm(4), tokenizer=tokenizer, draft="none").session().generate("abc", max_tokens=30)
        runtime = with_self_draft(lambda: toy_lm(4), tokenizer=tokenizer)
        session = runtime.session(policy=f"fixed:{k}")
        chunks = list(session.stream("abc", max_tokens=30))
        ids = tuple(t for c in chunks for t in c.token_ids)
        assert ids == plain.token_ids
        assert "".join(c.text for c in chunks) == plain.text == "".join(LETTERS[t] for t in ids if t not in (stop, 15))
        assert chunks[-1].finish == plain.finish
        # A next turn that goes on from this answer reads nothing again: what is cached is exactly what was delivered.
        before = runtime.target.rows  # type: ignore[attr-defined]
        history = [0, 1, 2, *ids, 7]
        session.generate(history, max_tokens=1)
        assert runtime.target.rows - before == 2  # type: ignore[attr-defined]


ALPHABET = {0: b"alpha", 1: b" be", 2: b"ta", 3: b" gam", 4: b"ma", 5: b" delta", 6: b" gaX"}


@pytest.mark.parametrize("k", [0, 8])
def test_esb_15_stop_strings_span_tokens_and_never_leak(k: int) -> None:
    tokenizer = letter_tokenizer(words=ALPHABET)
    answer = [0, 1, 2, 3, 4, 5]
    session = with_self_draft(lambda: scripted(answer, 1), tokenizer=tokenizer).session(policy=f"fixed:{k}")
    chunks = list(session.stream([9], max_tokens=20, stop=["ta gam"]))
    assert "".join(c.text for c in chunks) == "alpha be"
    assert chunks[-1].finish == "stop"
    assert [t for c in chunks for t in c.token_ids] == answer[:4]
    assert sum(c.trace.emitted for c in chunks if c.trace) == 4
    whole = session.generate([9], max_tokens=20, stop=["ta gam"])
    assert (whole.text, whole.finish, whole.stats.tokens) == ("alpha be", "stop", 4)

    near = with_self_draft(lambda: scripted([0, 1, 2, 6], 1), tokenizer=tokenizer).session(policy=f"fixed:{k}")
    assert near.generate([9], max_tokens=20, stop=["ta gam"]).text == "alpha beta gaX"


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_esb_13_max_tokens_is_exact(n: int) -> None:
    answer = with_self_draft(lambda: toy_lm(2)).session(policy="fixed:8").generate("abc", max_tokens=n)
    assert len(answer.token_ids) == answer.stats.tokens == n
    assert answer.finish == "length"
    assert answer.stats.kept <= answer.stats.drafted <= n - 1


def test_esb_73_the_context_limit_refuses_before_compute_and_ends_exactly() -> None:
    target, draft = toy_lm(1), toy_lm(1)
    session = toy_runtime(target, draft="itself", draft_engine=draft).session(policy="fixed:8", max_context=64)
    with pytest.raises(ContextLengthError, match="80 tokens and the context holds 64"):
        session.stream([1] * 80)
    assert target.forwards == draft.forwards == 0
    answer = session.generate([t % 15 for t in range(60)], max_tokens=100)
    assert (len(answer.token_ids), answer.finish) == (4, "length")
    assert target.deepest < 64 and draft.deepest < 64


def test_esb_16_parallel_sessions_answer_their_own_prompt() -> None:
    runtime = toy_runtime(toy_lm(7), draft="other", draft_engine=toy_draft(7))
    prompts = [[i % 15, (i * 3) % 15, 4, 5] for i in range(16)]
    fresh = [toy_runtime(toy_lm(7), draft="none").session().generate(p, max_tokens=24).token_ids for p in prompts]
    answers: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        with runtime.session(policy="fixed:3") as session:
            answers[i] = session.generate(prompts[i], max_tokens=24).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(16)] == fresh
    kept = runtime.session(policy="fixed:3")
    for prompt, ids in zip(prompts[:3], fresh[:3], strict=True):
        assert kept.generate(prompt, max_tokens=24).token_ids == ids


@pytest.mark.parametrize("after", [1, 2, 3])
def test_esb_38_cancelling_mid_answer_leaves_a_clean_session(after: int) -> None:
    make = lambda: toy_lm(5)  # noqa: E731
    session = with_self_draft(make).session(policy="fixed:4")
    got: list[int] = []
    finish = None
    for i, chunk in enumerate(session.stream("abc", max_tokens=60), 1):
        got += chunk.token_ids
        finish = chunk.finish
        if i == after:
            session.cancel()
    assert finish == "cancelled"
    assert len(got) <= 5 * after
    history = [0, 1, 2, *got, 9]
    expected = toy_runtime(make(), draft="none").session().generate(history, max_tokens=20).token_ids
    assert session.generate(history, max_tokens=20).token_ids == expected


def test_closing_a_stream_early_stops_the_work_and_keeps_the_session() -> None:
    target = toy_lm(5)
    session = toy_runtime(target, draft="none").session()
    stream = session.stream("abc", max_tokens=4096)
    next(stream)
    stream.close()
    done = target.forwards
    assert done == 2
    assert (
        session.generate("abc", max_tokens=5).token_ids
        == toy_runtime(toy_lm(5), draft="none").session().generate("abc", max_tokens=5).token_ids
    )


def test_cancelling_inside_a_long_prefill() -> None:
    target = toy_lm(5)
    token = CancelToken()
    session = toy_runtime(target, draft="none").session()
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        token.cancel()

    (chunk,) = session.stream([1] * 2000, max_tokens=5, cancel=token, progress=progress)
    assert (chunk.finish, chunk.text, chunk.token_ids) == ("cancelled", "", ())
    assert target.rows == 256 and seen == [257]
    # What was read before the cancel is not read again.
    session.generate([1] * 2000, max_tokens=1)
    assert target.rows == 2000


def test_a_second_stream_is_refused_while_one_is_running() -> None:
    session = toy_runtime(toy_lm(1), draft="none").session()
    stream = session.stream("abc", max_tokens=10)
    next(stream)
    with pytest.raises(CapabilityError, match="still answering"):
        next(session.stream("abc", max_tokens=10))
    assert len(list(stream)) == 9


def test_only_what_is_new_is_read_again() -> None:
    target = toy_lm(3)
    session = toy_runtime(target, draft="none").session()
    first = session.generate([1, 2, 3, 4], max_tokens=6)
    rows = target.rows
    session.generate([1, 2, 3, 4, *first.token_ids, 5, 6], max_tokens=1)
    assert target.rows - rows == 3  # the last answer token, 5, 6
    rows = target.rows
    session.generate([1, 2, 9], max_tokens=1)
    assert target.rows - rows == 1


def test_the_pair_must_share_a_vocabulary() -> None:
    other = toy_lm(1)
    object.__setattr__(other.spec, "vocab_digest", "another")
    with pytest.raises(CapabilityError, match="vocabularies differ"):
        toy_runtime(toy_lm(1), draft="x", draft_engine=other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.stream("abc", max_tokens=0), "max_tokens must be a whole number >= 1"),
        (lambda s: s.stream("abc", max_tokens=2.5), "max_tokens must be a whole number >= 1"),
        (lambda s: s.stream("", max_tokens=1), "the prompt is empty"),
        (lambda s: s.stream([16], max_tokens=1), "prompt token ids must lie in 0..15"),
        (lambda s: s.stream("abc", stop=[""]), "stop string must not be empty"),
        (lambda s: s.stream("abc", sampling=Sampling(temperature=-1)), "temperature must be >= 0"),
    ],
)
def test_bad_arguments_are_refused_at_the_door(call, message: str) -> None:  # type: ignore[no-untyped-def]
    target = toy_lm(1)
    with pytest.raises(ValueError, match=message):
        call(toy_runtime(target, draft="none").session())
    assert target.forwards == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fixed:x"}, "unknown policy"),
        ({"verify": "hope"}, "verify must be"),
        ({"max_context": 5000}, "max_context must lie in"),
    ],
)
def test_bad_settings_are_refused_when_the_session_opens(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Session(toy_runtime(toy_lm(1)), **options)  # type: ignore[arg-type]


def test_greedy_verification_refuses_a_temperature_instead_of_dropping_it() -> None:
    session = toy_runtime(toy_lm(1)).session(verify="greedy")
    with pytest.raises(ValueError, match="ignores temperature"):
        session.stream("abc", sampling=Sampling(temperature=0.5))


def test_chat_templates_raw_text_and_messages() -> None:
    tokenizer = letter_tokenizer(template=CHAT)
    seen: list[list[int]] = []

    def law(tokens: list[int]) -> np.ndarray:
        seen.append(list(tokens))
        return np.eye(16, dtype=np.float32)[15]

    session = toy_runtime(ToyEngine(law, vocab_size=16), draft="none", tokenizer=tokenizer).session()
    session.generate("ab")
    session.generate("ab", raw=True)
    session.generate([{"role": "user", "content": "cd"}])
    assert seen == [[0, 1, 15], [0, 1], [2, 3, 15]]


def test_knobs_cap_what_a_policy_asks_for() -> None:
    answer = with_self_draft(lambda: toy_lm(2)).session(policy="fixed:8", knobs=Knobs(max_draft_tokens=2)).generate("abc", max_tokens=30)
    assert max(t.drafted for t in answer.traces) == 2
    none = with_self_draft(lambda: toy_lm(2)).session(policy="fixed:8", knobs=Knobs(max_draft_tokens=0)).generate("abc", max_tokens=30)
    assert none.stats.drafted == 0 and none.token_ids == answer.token_ids


def test_seeds_make_sampling_repeatable_and_fixed_guesses_leave_it_alone() -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    plain = toy_runtime(toy_lm(2), draft="none").session().generate("abc", max_tokens=40, sampling=sampling)
    ngram = toy_runtime(toy_lm(2), draft="ngram").session(policy="fixed:4").generate("abc", max_tokens=40, sampling=sampling)
    assert plain.token_ids == ngram.token_ids
    assert (
        plain.token_ids
        != toy_runtime(toy_lm(2)).session().generate("abc", max_tokens=40, sampling=Sampling(temperature=1.0, seed=8)).token_ids
    )


def test_a_session_closes_the_model_it_owns_and_only_that() -> None:
    target, draft = toy_lm(1), toy_lm(1)
    runtime = toy_runtime(target, draft="itself", draft_engine=draft)
    with runtime.session() as session:
        session.generate("abc", max_tokens=2)
    assert not target.closed
    with Session(runtime, owns_runtime=True):
        pass
    assert target.closed and draft.closed


def test_a_new_session_starts_from_what_the_machine_showed_under_the_same_policy() -> None:
    runtime = with_self_draft(lambda: toy_lm(2))
    first = runtime.session(policy="fixed:2").generate("abc", max_tokens=30)
    assert runtime.recall("window").history == []
    assert [t.kept for t in runtime.recall("fixed:2").history] == [t.kept for t in first.traces]
    second = runtime.session(policy="fixed:2")
    assert second.generate("abc", max_tokens=30).token_ids == first.token_ids
    assert len(runtime.recall("fixed:2").history) == 2 * len(first.traces)
    assert [t.round for t in second.generate("abc", max_tokens=9).traces] == [0, 1, 2]


def test_what_a_closed_session_learnt_goes_on_in_the_next_without_being_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = 0
    learn = adaptive.learn

    def counting(memory: Memory, trace: RoundTrace) -> Memory:
        nonlocal folded
        folded += 1
        return learn(memory, trace)

    monkeypatch.setattr(adaptive, "learn", counting)
    monkeypatch.setattr(adaptive, "PLANNING_SHARE", math.inf)  # beside a toy's passes planning takes long
    runtime, rounds = with_self_draft(lambda: toy_lm(2)), 0
    for _ in range(4):
        with runtime.session() as session:
            rounds += len(session.generate("abc", max_tokens=30).traces)
    assert rounds - 4 <= folded <= rounds, "each round once, but for the last of an answer, after which nothing is planned"
    one, two = runtime.session(), runtime.session()
    assert one.generate("abc", max_tokens=30).token_ids == two.generate("abc", max_tokens=30).token_ids
    assert folded > 2 * rounds, "of two sessions at once the second reads for itself"


class Hot:
    """A sensor source on a device that is too hot, and on battery."""

    name = "hot"

    def read(self):  # type: ignore[no-untyped-def]
        return Reading(source="battery", battery=0.5, thermal="critical", temperature_c=99.0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "seeded"])
def test_heat_slows_the_answer_and_never_changes_it(sampling: Sampling) -> None:
    def answer(sensors: Sensors | None):  # type: ignore[no-untyped-def]
        meter = iter(range(0, 10_000, 5))
        with Runtime(
            toy_lm(2), letter_tokenizer(), draft="itself", draft_engine=toy_lm(2), sensors=sensors, meter_mj=lambda: float(next(meter))
        ) as runtime:
            if sensors is not None:
                sensors.poll()
            return runtime.session(policy="window").generate("abc", max_tokens=60, sampling=sampling)

    cool, hot = answer(None), answer(Sensors([Hot()]))
    assert hot.token_ids == cool.token_ids
    assert {t.thermal for t in hot.traces} == {"critical"} and {t.temperature_c for t in hot.traces} == {99.0}
    assert all("spared" in t.reason for t in hot.traces if t.planned)
    assert max(t.drafted for t in hot.traces) <= 4
    if sampling.greedy:
        assert max(t.drafted for t in cool.traces) > 4
    assert {t.energy_mj for t in cool.traces} == {5.0}


def test_a_session_stays_on_the_one_unit_it_has() -> None:
    """Whatever a profile says of others: nothing would move the work."""
    units = {"cpu": UnitProfile(bandwidth_gbs=80.0, busy_w=8.0), "npu": UnitProfile(bandwidth_gbs=60.0, busy_w=2.0)}
    governor, plans = Governor(FixedPolicy(2)), list[Plan]()

    class Listening(FixedPolicy):
        def __call__(self, history: Sequence[RoundTrace], state: RoundState, profile: DeviceProfile, knobs: Knobs) -> Plan:
            assert state.units == ("cpu",)
            plans.append(governor(history, state, profile, knobs))
            return plans[-1]

    prompt = [1, 2, 3]
    parts = replace(
        parts_for(toy_lm(2), NgramDrafter(), prompt, k=2),
        policy=Listening(2),
        profile=DeviceProfile(chip="x", units=units),
        power=lambda: PowerThermalState(thermal="serious"),
    )
    prefill(parts, prompt)
    traces = [round.trace for round in decode(parts, prompt[-1], max_tokens=8, stop_ids=frozenset())]
    assert {plan.unit for plan in plans} == {""}
    assert all("restrained" in trace.reason and "npu" not in trace.reason for trace in traces)


def test_below_the_users_battery_limit_nothing_is_drafted() -> None:
    sensors = Sensors([Hot()])
    sensors.poll()
    with Runtime(toy_lm(2), letter_tokenizer(), draft="itself", draft_engine=toy_lm(2), sensors=sensors) as runtime:
        session = runtime.session(policy="window", knobs=Knobs(min_battery=0.6))
        assert session.generate("abc", max_tokens=12).stats.drafted == 0


def test_a_long_session_forgets_its_oldest_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_LONGEST_HISTORY", 40)
    session = toy_runtime(toy_lm(2), draft="none").session(policy="adaptive")
    for _ in range(10):
        assert session.generate("abc", max_tokens=30).stats.tokens == 30
        assert len(session._history) <= 40


def test_another_session_has_the_same_settings_and_its_own_conversation() -> None:
    target = toy_lm(3)
    first = toy_runtime(target, draft="none").session(policy="fixed:2", max_context=32)
    second = first.another()
    assert (second.max_context, second.runtime) == (32, first.runtime)
    answer = first.generate([1, 2, 3], max_tokens=6)
    stream = first.stream([1, 2, 3], max_tokens=6)
    next(stream)
    rows = target.rows
    assert second.generate([1, 2, 3], max_tokens=6).token_ids == answer.token_ids  # while the first is still answering
    assert target.rows - rows == 3 + 5  # it read the whole prompt itself
    second.close()
    assert len(list(stream)) == 5
    assert not target.closed
