from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.core.drafter import Offer
from edgespec.core.errors import ArtifactError
from edgespec.drafting.ngram import EXPECTED
from edgespec.orchestrator.runtime import Runtime
from edgespec_apps import recorder, recording, texts
from edgespec_apps.recording import LONGEST, RecordedAnswer, Recording, Step, Track
from tests.helpers import fake_runtime
from tests.helpers.fake_runtime import END, VOCAB, ByteTokenizer
from tests.helpers.toys import ToyEngine, hashed_logits

CONTEXT = 400
ANSWER = RecordedAnswer("chat", 7, 5, {"model": Track((3, 2, 1, 0, 1)), "ngram": Track((0, 2, 1, 0, 0), (1, 4, 3, 1, 0), (1, 2, 2, 1, 0))})
RECORDING = Recording(
    model="toy", recipe="int8", drafts={"model": "tiny", "ngram": "ngram"}, max_tokens=5, date="2026-01-02", version="0", command="c",
    answers=[ANSWER, replace(ANSWER, kind="json")],
)  # fmt: skip


def unsure(tokens: list[int]) -> np.ndarray:
    """The target's own token two times in three, as drawn by the tokens before."""
    logits = fake_runtime.law(tokens)
    return logits if hashed_logits(tokens, 3, 3).argmax() else np.roll(logits, 1)


def toy_runtime(drafter: str, draft_context: int = CONTEXT) -> Runtime:
    target = ToyEngine(fake_runtime.law, vocab_size=VOCAB, max_context=CONTEXT)
    draft = ToyEngine(unsure, vocab_size=VOCAB, max_context=draft_context) if drafter == "model" else None
    name = "tiny" if draft else "ngram"
    return Runtime(target, ByteTokenizer(), draft=name, draft_engine=draft, engine_name="toy")  # type: ignore[arg-type]


def record(runtime: Runtime, max_tokens: int) -> tuple[Sequence[int], RecordedAnswer]:
    prompt = runtime.tokenizer.encode_chat([{"role": "user", "content": "abcabdabe, twice told: abcabdabe"}])
    with runtime.session(policy="fixed:0", max_context=CONTEXT) as session:
        answer = session.generate(prompt, max_tokens=max_tokens).token_ids
    return prompt, recorder.record_answer(runtime, "chat", prompt, answer, max_context=CONTEXT)


@pytest.mark.parametrize("gamma", range(1, 9))
@pytest.mark.parametrize("max_tokens", [40, 200], ids=["cut", "ended"])
@pytest.mark.parametrize(("drafter", "draft_context"), [("ngram", CONTEXT), ("model", CONTEXT), ("model", 70)])
def test_a_replay_is_the_session(drafter: str, draft_context: int, max_tokens: int, gamma: int) -> None:
    """Round for round, for answers that end by themselves and at the limit, and for a draft whose context runs full."""
    with toy_runtime(drafter, draft_context) as runtime:
        prompt, recorded = record(runtime, max_tokens)
        with runtime.session(policy=f"fixed:{gamma}", max_context=CONTEXT) as session:
            real = session.generate(prompt, max_tokens=max_tokens)
    assert len(real.token_ids) == recorded.tokens and (real.token_ids[-1] == END) == (real.finish == "stop") == (max_tokens == 200)
    made = replace(RECORDING, max_tokens=max_tokens, drafts=dict.fromkeys(recorded.tracks, "x"), answers=[recorded])
    reader = texts.Recorded(made, (drafter,)).reader()
    for trace in real.traces:
        assert reader.context_len == trace.context_len + 1
        room = max_tokens - reader.position - 1
        assert reader.room == room and trace.planned == min(gamma, room)
        most = min(room, LONGEST)
        (offer,), (told,) = reader.offers(most), (offer for offer in trace.offers if offer.drafter == drafter)
        assert (most if offer.tokens is None else offer.tokens) == (most if told.tokens is None else told.tokens)
        assert (offer.confidence, offer.expected) == (told.confidence, told.expected)
        assert reader.step(drafter, trace.planned) == (trace.drafted, trace.kept)
        assert reader.trials() == tuple(trial for trial in trace.trials if trial.drafter == drafter)
    assert any(trace.trials for trace in real.traces) == (drafter == "ngram")
    assert reader.position == 0, "the answer is over, and the next one begins"
    assert sum(trace.kept for trace in real.traces) > 0 and any(trace.kept < trace.drafted for trace in real.traces)


def test_the_draft_reads_prompt_and_answer_once() -> None:
    with toy_runtime("model") as runtime:
        prompt, recorded = record(runtime, 200)
        assert isinstance(runtime.draft_engine, ToyEngine) and runtime.draft_engine.rows == len(prompt) + recorded.tokens - 1
    assert list(recorded.tracks) == ["model", "ngram"] and recorded.tracks["model"].offered is None


def test_a_recording_names_the_model_behind_each_drafter() -> None:
    target, draft = (
        ToyEngine(law, vocab_size=VOCAB, max_context=CONTEXT, name=name) for law, name in ((fake_runtime.law, "big"), (unsure, "tiny"))
    )
    with Runtime(target, ByteTokenizer(), draft="ngram,tiny", draft_engine=draft) as runtime:  # type: ignore[arg-type]
        made = recorder.record(runtime, [("chat", [1, 2], [3, 4])], recipe="int8", max_tokens=2, max_context=CONTEXT, command="c")
    assert made.model == "big" and made.drafts == {"model": "tiny", "ngram": "ngram"}
    assert recording.parse(recording.to_lines(made), origin="r").answers[0].prompt_tokens == 2


def test_rounds_go_no_further_than_offers_hits_and_the_answer() -> None:
    assert ANSWER.step("model", 0, 2) == Step(2, 2, 3)
    assert ANSWER.step("model", 0, 8) == Step(8, 3, 4)
    assert ANSWER.step("ngram", 0, 8) == Step(1, 0, 1)
    assert ANSWER.step("ngram", 1, 3) == Step(3, 2, 4)
    assert ANSWER.step("model", 4, 4) == Step(4, 0, 5), "the last token is the target's own, guessed or not"
    assert ANSWER.step("model", 2, 0) == Step(0, 0, 3)


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    recording.save(RECORDING, file)
    again = recording.load(file)
    assert recording.to_lines(again) == recording.to_lines(RECORDING) == file.read_text(encoding="utf-8")
    assert again.answers[1].kind == "json"
    offers = [again.answers[1].tracks[name].offer(name, 1, most) for name in ("model", "ngram") for most in (3, 16)]
    assert offers == [Offer("model"), Offer("model"), Offer("ngram", 3, 2, EXPECTED[2]), Offer("ngram", 4, 2, EXPECTED[2])]
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def lines() -> list[dict]:
    return [json.loads(line) for line in recording.to_lines(RECORDING).splitlines()]


def put(row: int, *path: str, value: object) -> Callable[[list[dict]], None]:
    def change(rows: list[dict]) -> None:
        at = rows[row]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put(0, "schema", value="edgespec.recording/9"), r"line 1: schema 'edgespec.recording/9' where this version reads"),
        (put(0, "schema", value=None), "line 1: schema must be str, found None"),
        (put(0, "max_tokens", value=4), r"line 2: tokens must lie in 1..4, found 5"),
        (put(0, "max_tokens", value=True), "max_tokens must be int, found True"),
        (put(0, "drafts", value={}), "must name a model for each drafter"),
        (put(0, "drafts", value={"ngram": "ngram"}), r"line 2: tracks of \['model', 'ngram'\]"),
        (put(1, "kind", value=["chat"]), "line 2: kind must be str"),
        (put(1, "prompt_tokens", value=0), "prompt_tokens must lie in 1"),
        (put(1, "tokens", value=1e9), "line 2: tokens must be int"),
        (put(2, "tracks", "model", value=[]), "line 3: the track of 'model' must have right, offered and confidence"),
        (put(1, "tracks", "model", "right", value=None), "right of 'model' needs 5 digits"),
        (put(1, "tracks", "model", "right", value="3210"), "right of 'model' needs 5 digits from 0123456789abcdefg, found 4;"),
        (put(1, "tracks", "model", "right", value="32h01"), "found 'h'"),
        (put(1, "tracks", "model", "right", value="60000"), "right about 6 tokens where 5 are left"),
        (put(1, "tracks", "ngram", "confidence", value="1a000"), "confidence of 'ngram' needs 5 digits from 0123456789, found 'a'"),
        (put(1, "tracks", "ngram", "offered", value="٠٠٠٠٠"), "offered of 'ngram' needs 5 digits"),
    ],
)
def test_damaged_recordings_are_refused_with_the_line(change: Callable[[list[dict]], None], says: str) -> None:
    rows = lines()
    change(rows)
    with pytest.raises(ArtifactError, match=says) as caught:
        recording.parse("\n".join(json.dumps(row) for row in rows), origin="r.jsonl")
    assert "r.jsonl" in str(caught.value) and "edgespec bench --record" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"{", "line 1: no JSON"),
        (b"[1]\n", "an object was expected, found list"),
        (b"[" * 100_000, "line 1: no JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (recording.to_lines(RECORDING).splitlines()[0].encode(), "line 1: no answer follows"),
        (recording.to_lines(RECORDING).encode()[:-20], "line 3: no JSON"),
    ],
)
def test_files_that_are_none(data: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match=says):
        recording.load(file)
    with pytest.raises(ArtifactError, match="cannot read the recording"):
        recording.load(tmp_path / "absent.jsonl")


def test_the_bundled_recording_is_whole() -> None:
    found = recording.bundled()
    assert found.drafts == {"model": "qwen2.5-coder-0.5b", "ngram": "ngram"} and found.command.startswith("edgespec bench ")
    assert {answer.kind for answer in found.answers} == {"code-edit", "chat", "json", "summary"}
    for answer in found.answers:
        assert answer.tracks["model"].offered is None and answer.tracks["ngram"].offered is not None
        assert sum(answer.tracks["model"].right) > 0


def test_kinds_take_turns_and_the_seed_decides() -> None:
    answers = [replace(ANSWER, kind=kind, prompt_tokens=10 * i + j + 1) for i, kind in enumerate("abc") for j in range(2)]
    made = replace(RECORDING, answers=answers)

    def order(seed: int) -> list[int]:
        reader, found = texts.Recorded(made, ("model",), seed).reader(), list[int]()
        while len(found) < 12:
            found += [reader.context_len] if reader.position == 0 else []
            reader.step("model", 0)
        return found

    first = order(1)
    assert first == order(1) and any(first != order(seed) for seed in range(2, 6))
    for turn in range(0, 12, 3):
        assert {prompt // 10 for prompt in first[turn : turn + 3]} == {0, 1, 2}, "one of each kind"
    for half in (first[:6], first[6:]):
        assert len(set(half)) == 6, "none again before all were given"


def test_a_drafter_that_was_not_recorded_is_refused() -> None:
    with pytest.raises(ArtifactError, match="no drafter 'lookup', only model, ngram"):
        texts.Recorded(RECORDING, ("model", "lookup"))


def test_the_bench_records_its_plain_answers(command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from edgespec_apps import machine
    from edgespec_apps.measure import Prompt

    monkeypatch.setattr(machine, "bandwidth_gbs", lambda **_: 20.0)
    monkeypatch.setattr(
        "edgespec_apps.bench.load_prompts", lambda kinds, first: [Prompt(kind, "short", f"{kind} {kind}") for kind in kinds]
    )
    file = tmp_path / "r.jsonl"
    arguments = ("bench", "--model", "m", "--kinds", "chat,json", "--repeats", "2", "--max-tokens", "20", "--json")
    result = command(*arguments, "--record", str(file))
    assert result.code == 0 and "recorded 2 answers" in result.err
    found = recording.load(file)
    assert [(answer.kind, answer.tokens) for answer in found.answers] == [("chat", 20), ("json", 20)]
    assert found.model == "m" and found.max_tokens == 20 and found.drafts == {"ngram": "ngram"}
    assert "--kinds chat,json --max-tokens 20" in found.command and str(tmp_path) not in file.read_text(encoding="utf-8")
    result = command(*arguments, "--record", str(tmp_path / "absent" / "r.jsonl"))
    assert result.code == 2 and "there is no folder" in result.err
