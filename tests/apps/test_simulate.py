from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from edgespec.core.drafter import Offer
from edgespec.core.errors import ArtifactError
from edgespec.core.plan import Plan
from edgespec.core.trace import RoundTrace
from edgespec.drafting.model import Streak
from edgespec.scheduling.adaptive import DETOUR
from edgespec_apps import cli, recording, simulation_report
from edgespec_apps.simulation import DEFAULT_POLICIES, Scene, Work, compare, flips, runs, summary
from edgespec_apps.simulation_report import explain
from edgespec_apps.texts import Constant, Recorded, Text
from edgespec_device_profiles import cooling, registry
from edgespec_device_profiles.estimates import bandwidth_gbs, pass_ms, size_from_name
from tests.helpers.browser import browser, opened

FIXED = tuple(name for name in DEFAULT_POLICIES if name.startswith("fixed"))


def scene(chip: str, case: str, target: str, draft: str | None, minutes: float = 10.0, alpha: float = 0.75) -> Scene:
    return Scene(
        chip=registry.load(chip),
        case=cooling.case(case),
        target=size_from_name(target),
        draft=size_from_name(draft) if draft else None,
        text=Constant(alpha),
        minutes=minutes,
    )


def test_the_same_seed_gives_the_same_run() -> None:
    where = scene("apple-m4", "fanless", "8b", "600m", minutes=0.5)
    runs = [summary(*where.run(where.policy("adaptive+governor"))) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("chip", "target", "draft"), [("apple-a19-pro", "2b", "300m"), ("snapdragon-8-elite", "3b", None)])
def test_on_a_phone_the_governor_wins_by_moving_to_the_cooler_unit(chip: str, target: str, draft: str | None) -> None:
    rows = compare(scene(chip, "phone", target, draft), ("fixed:3", "fixed:4", "fixed:6", "fixed:7", "adaptive+governor"))
    governed = rows.pop("adaptive+governor")
    best = max(rows.values(), key=lambda row: row["tokens"])
    assert governed["tokens"] > 1.1 * best["tokens"]
    assert governed["peak_c"] < cooling.CASES["phone"].limit_c + 8.0  # below the critical line
    assert governed["energy_j"] / governed["tokens"] < best["energy_j"] / best["tokens"]
    assert governed["plan_flips"] <= 10 * 60 / 5


def test_a_fanless_laptop_gains_when_there_is_time_to_get_hot() -> None:
    rows = compare(scene("apple-m4", "fanless", "8b", "600m", minutes=30), ("fixed:3", "adaptive+governor"))
    assert rows["adaptive+governor"]["tokens"] > 1.1 * rows["fixed:3"]["tokens"]
    assert rows["fixed:3"]["tok_s_last_minute"] < 0.6 * rows["fixed:3"]["tok_s_first_minute"]
    assert rows["adaptive+governor"]["plan_flips"] <= 30 * 60 / 10


def test_where_nothing_gets_hot_the_governor_changes_nothing() -> None:
    rows = compare(scene("apple-m2-ultra", "desktop", "14b", "600m", minutes=2), (*FIXED, "adaptive", "adaptive+governor"))
    assert rows["adaptive+governor"] == rows["adaptive"]
    assert rows["adaptive"]["tokens"] > 0.97 * max(rows[name]["tokens"] for name in FIXED)
    assert rows["fixed:3"]["tok_s_last_minute"] == pytest.approx(rows["fixed:3"]["tok_s_first_minute"], rel=0.05)


def test_the_phone_stays_close_to_the_runs_it_was_fitted_to() -> None:
    assert cooling.phone_fit_error() < 0.05
    for _, _, _, onset_s, published_s in cooling.phone_fit():
        assert 0.5 < onset_s / published_s < 1.5


def test_costs_follow_from_bandwidth_and_compute() -> None:
    chip, size = registry.load("apple-m4"), size_from_name("8b")
    one = pass_ms(chip, "gpu", size, rows=1, context=0)
    assert one >= size.weight_bytes / (bandwidth_gbs(chip, "gpu") * 1e9) * 1e3
    assert one < pass_ms(chip, "gpu", size, rows=8, context=0) < 8 * one
    assert pass_ms(chip, "gpu", size, rows=1, context=4096) > one
    assert pass_ms(chip, "npu", size, rows=1, context=0) > one  # the NPU reads more slowly


@pytest.mark.parametrize(
    ("name", "parameters"), [("7b", 7e9), ("qwen2.5-coder-1.5b", 1.5e9), ("smollm2-135m", 135e6), ("Gemma-3-270M-it", 270e6)]
)
def test_sizes_from_names(name: str, parameters: float) -> None:
    assert size_from_name(name).parameters == pytest.approx(parameters)


def test_a_name_without_a_size_is_refused() -> None:
    with pytest.raises(ArtifactError, match="names no size"):
        size_from_name("mystery-model")


def test_the_command_ends_with_one_json_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    arguments = ["simulate", "--profile", "apple-m4", "--model", "8b", "--minutes", "0.2", "--policy", "fixed:2", "--policy", "adaptive"]
    assert cli.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "edgespec.simulate/1" and found["profile"] == "apple-m4" and found["minutes"] == 0.2
    assert set(found["policies"]) == {"fixed:2", "adaptive"}
    wanted = {"tokens", "tok_s_first_minute", "tok_s_last_minute", "peak_c", "energy_j", "plan_flips"}
    assert all(wanted <= set(row) for row in found["policies"].values())
    assert 0 <= found["fit_error"] < 0.05
    assert cli.run(arguments) == 0
    printed = capsys.readouterr().out
    assert "All figures are estimates" in printed and "published runs of a phone, met within" in printed
    assert "0.2 simulated minutes of 8b, draft that costs nothing, on Apple M4 (fanless)." in printed


def test_placement_alone_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    where = scene("apple-a19-pro", "phone", "2b", "300m", minutes=1.0)
    found = runs(where, ("fixed:3", "fixed:3@npu"))
    assert summary(*found["fixed:3@npu"])["npu_share"] == 1.0 and summary(*found["fixed:3"])["npu_share"] == 0.0
    said = " ".join(f"{finding}" for finding in explain(found))
    assert "fixed:3 is the best fixed length" in said and "100% of the time on the NPU" in said
    with pytest.raises(ValueError, match="known policies"):
        where.policy("magic@npu")


def test_unknown_chips_and_policies_are_clear_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["simulate", "--profile", "apple-m99", "--model", "8b"]) == 1
    assert "apple-m4" in capsys.readouterr().err
    assert cli.run(["simulate", "--profile", "apple-m4", "--model", "8b", "--policy", "magic"]) == 2
    assert "known policies" in capsys.readouterr().err


def test_the_report_is_a_page_of_its_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    arguments = ["simulate", "--profile", "apple-a19-pro", "--model", "2b", "--draft", "300m", "--minutes", "1", "--warm", "2"]
    arguments += ["--policy", "fixed:3", "--policy", "adaptive+governor", "--out", str(tmp_path / "new" / "folder"), "--json"]
    assert cli.run(arguments) == 0
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)["policies"]) == {"fixed:3", "adaptive+governor"}
    (file,) = (tmp_path / "new" / "folder").iterdir()
    assert str(file) in printed.err
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "<script" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(charts) == 4
    for chart in charts:
        ElementTree.fromstring(chart)
    assert "critical at 78 °C" in charts[1]
    assert text.index("more tokens than fixed:3, the best fixed length") < text.index("best fixed length, with") < text.index("Totals")
    for words in ("after 2 minutes of full work", "avoided throttling", "best fixed length", "All figures are estimates", "J/token"):
        assert words in text


def test_a_gain_names_the_drafters_that_made_it() -> None:
    where = session("model", "ngram", minutes=1.0)
    found = {name: where.run(where.policy(name)) for name in ("fixed:1", "adaptive")}
    _, adaptive = simulation_report.explain(found)
    assert adaptive.good and re.search(r"draft plan \(drafts by model \d+%, ngram \d+%; ", adaptive.text)
    assert "drafts by" not in " ".join(map(str, simulation_report.explain({name: run for name, run in found.items() if name == "fixed:1"})))


def test_the_screen_shows_the_fit_of_the_case_that_was_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "2b", "--minutes", "0.2", "--warm", "1", "--policy", "fixed:0", "--policy", "adaptive"]
    assert cli.run(["simulate", "--profile", "apple-a19-pro", *arguments]) == 0
    phone = capsys.readouterr().out
    assert "(phone) after 1 minutes of full work" in phone and "Fit of the phone case" in phone
    assert max(len(line) for line in phone.splitlines() if line.startswith(("policy", "fixed", "adaptive "))) <= 80
    assert phone.index("adaptive: ") < phone.index("Fit of the phone case"), "what it comes to, before what it rests on"
    assert cli.run(["simulate", "--profile", "apple-m2-ultra", *arguments]) == 0
    assert "Fit of the phone case" not in capsys.readouterr().out


def test_warm_devices_start_slower_and_every_policy_reads_the_same_text() -> None:
    cold = scene("apple-a19-pro", "phone", "2b", "300m", minutes=1.0)
    warm = replace(cold, warm_minutes=5.0)
    rows = [compare(where, ("fixed:0", "fixed:3"))["fixed:3"] for where in (cold, warm)]
    assert rows[1]["tok_s_first_minute"] < 0.8 * rows[0]["tok_s_first_minute"]
    assert all(row["clock_share"] < 1.0 and row["npu_share"] == 0.0 for row in rows)
    histories = [where.run(where.policy("fixed:3")).history for where in (cold, warm)]
    assert all(a.kept == b.kept for a, b in zip(*histories, strict=False)), "heat changes the pace, not the text"


def session(*drafters: str, text: Text | None = None, minutes: float = 0.5) -> Scene:
    """A recorded text on a laptop that stays cool."""
    cool = scene("apple-m4-max", "desktop", "8b", "600m" if "model" in drafters else None, minutes=minutes)
    return replace(cool, text=text or Recorded(recording.bundled(), drafters))


class Named:
    """Always the same number of nodes, by the drafters in turn."""

    name, wants_entropy = "named", False

    def __init__(self, draft_tokens: int, *drafters: str) -> None:
        self._draft_tokens, self._drafters = draft_tokens, drafters

    def __call__(self, history, state, profile, knobs) -> Plan:  # type: ignore[no-untyped-def]
        return Plan(min(self._draft_tokens, state.room), "named", drafter=self._drafters[len(history) % len(self._drafters)])


def test_rounds_of_a_recorded_text_are_those_of_a_session() -> None:
    where = session("model", "ngram")
    history, _, works = where.run(where.policy("fixed:4"))
    answers = {answer.prompt_tokens: answer for answer in recording.bundled().answers}
    begins = [i for i, work in enumerate(works) if work.room == recording.bundled().max_tokens - 1]
    assert len(begins) > 3
    for begin, end in itertools.pairwise(begins):
        rounds = history[begin:end]
        assert rounds[0].context_len + 1 in answers
        assert [b.context_len - a.context_len for a, b in itertools.pairwise(rounds)] == [a.emitted for a in rounds[:-1]]
        assert sum(trace.emitted for trace in rounds) == answers[rounds[0].context_len + 1].tokens
    for trace, work in zip(history, works, strict=True):
        assert trace.drafter == "model" and trace.planned == trace.drafted == min(4, work.room) and trace.rows == trace.drafted + 1
        model, ngram = trace.offers
        assert model == Offer("model", None, model.confidence, Streak.EXPECTED[model.confidence]) and ngram.drafter == "ngram"
        assert ngram.tokens is not None and ngram.tokens <= min(16, work.room)
    assert all(len({trace.offers[i].confidence for trace in history}) > 2 for i in range(2))


def test_only_the_draft_model_costs_time_and_it_catches_up_on_what_others_wrote() -> None:
    both = session("model", "ngram")
    by_ngram = both.run(Named(4, "ngram")).history
    assert all(trace.drafter == "ngram" and trace.draft_ms == 0.0 for trace in by_ngram)
    assert any(trace.drafted == 0 for trace in by_ngram) and any(0 < trace.drafted < 4 for trace in by_ngram)
    by_model = both.run(Named(4, "model")).history
    in_turns = both.run(Named(4, "model", "ngram")).history
    longest = {name: max(trace.draft_ms for trace in rounds) for name, rounds in (("model", by_model), ("turns", in_turns))}
    assert all(trace.draft_ms > 0 for trace in by_model if trace.drafted) and longest["turns"] > longest["model"]
    assert [trace.drafter for trace in in_turns[:4]] == ["model", "ngram", "model", "ngram"]
    alone = session("ngram")
    assert [trace.kept for trace in alone.run(alone.policy("fixed:4")).history[:500]] == [trace.kept for trace in by_ngram[:500]]


def test_a_longer_context_costs_more() -> None:
    where = session("ngram", minutes=1.0)
    history = sorted(where.run(where.policy("fixed:0")).history, key=lambda trace: trace.context_len)
    assert history[-1].context_len > history[0].context_len + 300 and history[-1].verify_ms > history[0].verify_ms


def test_a_recorded_text_is_the_same_by_seed_and_for_every_policy() -> None:
    first, again, other = (session("model", "ngram", text=Recorded(recording.bundled(), ("model", "ngram"), seed)) for seed in (1, 1, 2))
    kept = [[trace.kept for trace in where.run(where.policy("fixed:2")).history] for where in (first, again, other)]
    assert kept[0] == kept[1] != kept[2]
    prompts = [
        [trace.context_len for trace, work in zip(run.history, run.works, strict=True) if work.room == recording.bundled().max_tokens - 1]
        for run in (first.run(first.policy(name)) for name in ("fixed:0", "fixed:3"))
    ]
    assert all(a == b for a, b in zip(*prompts, strict=False)) and len(prompts[0]) > 2


def rounds(*plans: tuple[str, int, Offer], room: int = 99, reason: str = "") -> tuple[list[RoundTrace], list[Work]]:
    history: list[RoundTrace] = []
    for drafter, planned, offer in plans:
        drafted = min(planned, room, planned if offer.tokens is None else offer.tokens)
        other = Offer("other", None)
        history.append(
            RoundTrace(
                round=len(history), context_len=9, drafter=drafter, planned=planned, drafted=drafted, kept=0, emitted=1, rows=drafted + 1,
                reason=reason, offers=(offer, other),
            )
        )  # fmt: skip
    return history, [Work("gpu", 1.0, 1.0, room)] * len(history)


def test_a_flip_is_a_change_of_mind_about_the_same_offers() -> None:
    sure, unsure, none = Offer("a", 12, 4), Offer("a", 2, 1), Offer("a", 0, 0)
    assert flips(*rounds(("a", 3, sure), ("a", 4, sure), ("a", 4, sure), ("a", 3, sure))) == 2
    assert flips(*rounds(("a", 3, sure), ("other", 3, sure), ("a", 0, sure), ("other", 0, sure))) == 2, "no draft is nobody's"
    assert flips(*rounds(("a", 8, sure), ("a", 1, unsure), ("a", 8, sure), ("a", 1, unsure))) == 0, "other offers, other plan"
    assert flips(*rounds(("a", 8, Offer("a", 3, 1)), ("a", 2, Offer("a", 3, 1)), ("a", 8, unsure))) == 1, "2 of 3 is less than all"
    assert flips(*rounds(("a", 8, unsure), ("a", 8, Offer("a", 3, 1)), ("a", 8, unsure))) == 0, "each time all there was"
    assert flips(*rounds(("a", 8, none), ("a", 0, none), ("a", 3, none))) == 0
    assert flips(*rounds(("a", 3, sure), ("a", 5, sure), reason=f"{DETOUR} at 5 beside 3")) == 0
    assert flips(*rounds(("a", 0, sure), ("a", 4, sure), room=0)) == 0
    long, short = rounds(("a", 8, sure), ("a", 8, sure)), rounds(("a", 3, sure), room=3)
    assert flips(long[0] + short[0] + long[0], long[1] + short[1] + long[1]) == 0, "the answer's end cut it short"


def test_the_command_plays_the_bundled_text_unless_told_otherwise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    arguments = ["simulate", "--profile", "apple-m4-max", "--model", "8b", "--minutes", "0.2", "--policy", "fixed:3", "--policy", "fixed:0"]

    def said(*more: str) -> dict:
        assert cli.run([*arguments, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    file = tmp_path / "mine.jsonl"
    recording.save(replace(recording.bundled(), model="mine"), file)
    bundled, mine, constant = said(), said("--recording", str(file)), said("--acceptance", "0.75")
    assert "qwen2.5-coder-1.5b" in bundled["text"] and "mine" in mine["text"] and constant["text"] == "acceptance 0.75"
    assert bundled["policies"] == mine["policies"] != constant["policies"]
    assert said("--draft", "600m")["policies"]["fixed:3"] != bundled["policies"]["fixed:3"]
    assert cli.run(arguments) == 0
    printed = capsys.readouterr().out
    assert "prompts are taken as read" in printed and "Changes: another draft length or drafter" in printed
    assert cli.run([*arguments, "--recording", str(file), "--acceptance", "0.5"]) == 2
    assert "two texts" in capsys.readouterr().err
    assert cli.run([*arguments, "--recording", str(tmp_path / "absent.jsonl")]) == 1
    assert "cannot read the recording" in capsys.readouterr().err


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine: the report was not opened in a browser")
@pytest.mark.parametrize("drafters", [("model", "ngram"), ("ngram",), ()], ids=["both", "ngram", "constant"])
def test_a_browser_opens_the_report_without_a_word_on_its_console(drafters: tuple[str, ...], tmp_path: Path) -> None:
    where = session(*drafters, text=None if drafters else Constant(0.75))
    found = {name: where.run(where.policy(name)) for name in ("fixed:0", "fixed:3", "adaptive+governor")}
    page = tmp_path / "report.html"
    page.write_text(simulation_report.page(where, "desktop", found, 0.01), encoding="utf-8")
    dom, console = opened(page)
    assert console == []
    assert dom.count("<svg") == 4 and dom.rstrip().endswith("</html>")
