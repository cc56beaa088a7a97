from __future__ import annotations

import errno
import json
import os
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from edgespec_apps import machine
from edgespec_apps.measure import (
    KINDS,
    Prompt,
    Run,
    Sample,
    drift,
    load_prompts,
    mean_context,
    measure,
    orders,
    prefill_tok_s,
    ratio,
    tok_s,
)
from edgespec_apps.peer import LlamaPeer, PeerUnavailable
from tests.helpers import fake_runtime


def run(tok_s: float, ids: tuple[int, ...] = (1, 2), ttft_s: float = 0.5) -> Run:
    return Run(token_ids=ids, tok_s=tok_s, ttft_s=ttft_s)


def sample(name: str, repeat: int, plain: float, spec: float, kind: str = "chat", **others: float) -> Sample:
    runs = {"plain": run(plain), "spec": run(spec)} | {key: run(value) for key, value in others.items()}
    return Sample(Prompt(kind, name, ""), repeat, 10, runs)


@pytest.fixture
def bench(command, monkeypatch):
    """Run `edgespec bench` without measuring the memory, on one short prompt per kind."""
    monkeypatch.setattr(machine, "bandwidth_gbs", lambda **_: 20.0)
    monkeypatch.setattr(
        "edgespec_apps.bench.load_prompts", lambda kinds, first: [Prompt(kind, "short", f"{kind} {kind}") for kind in kinds]
    )
    return lambda *arguments: command("bench", "--model", "m", *arguments)


def test_json_has_the_promised_keys(bench):
    result = bench("--kinds", "chat,json", "--repeats", "2", "--draft", "ngram", "--policy", "fixed:3", "--json")
    assert result.code == 0
    [line] = result.out.splitlines()
    report = json.loads(line)
    assert report["schema"] == "edgespec.bench/1"
    assert (report["model"], report["draft"], report["policy"], report["peer"]) == ("m", "ngram", "fixed:3", None)
    assert report["machine"]["threads"] >= 1
    assert list(report["kinds"]) == ["chat", "json"]
    for figures in report["kinds"].values():
        assert figures["plain_tok_s"] > 0 and figures["spec_tok_s"] > 0 and figures["ratio"] > 0
        assert figures["kept_per_round"] > 0
        assert figures["identical"] == "2/2"
        assert [s["order"] for s in figures["samples"]] in ([["plain", "spec"], ["spec", "plain"]], [["spec", "plain"], ["plain", "spec"]])
    assert report["bandwidth_gbs"] == 20.0
    assert report["ceiling_tok_s"] == pytest.approx(20e9 / (4 * report["mean_context"]))  # the toy has no weights, 4 bytes per token
    assert 0 <= report["overhead_share"] <= 1
    assert report["prefill_tok_s"] > 0


def test_rivals_are_measured_in_the_same_turns(bench):
    result = bench("--kinds", "chat", "--repeats", "2", "--policy", "adaptive", "--rivals", "fixed:2, fixed:5,fixed:2", "--json")
    report = json.loads(result.out)
    chat = report["rivals"]["kinds"]["chat"]
    assert list(chat["ratios"]) == ["fixed:2", "fixed:5"]
    assert chat["best"] in chat["ratios"] and chat["ours_over_best"] > 0
    assert report["kinds"]["chat"]["samples"][0]["order"] == ["plain", "spec", "fixed:2", "fixed:5"]
    assert "fixed:2" in bench("--kinds", "chat", "--repeats", "1", "--rivals", "fixed:2").out
    assert bench("--kinds", "chat", "--rivals", "sometimes").code == 2


@pytest.mark.parametrize("energy", ["fast", "saver"])
def test_plain_decoding_and_fixed_rivals_are_measured_whatever_energy_asks_for(bench, energy: str):
    result = bench("--kinds", "chat", "--repeats", "1", "--energy", energy, "--rivals", "fixed:2,window,fixed:2+governor", "--json")
    assert result.code == 0, result.err
    assert list(json.loads(result.out)["rivals"]["kinds"]["chat"]["ratios"]) == ["fixed:2", "window", "fixed:2+governor"]
    assert bench("--kinds", "chat", "--energy", energy, "--policy", "fixed:2").code == 1  # asked for as one's own it is refused


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_bad_rivals_and_records_are_refused_before_anything_is_loaded(bench, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")  # stands for a device, whose place a file would take
    for arguments in (["--rivals", "sometimes"], ["--record", str(tmp_path)], ["--record", str(tmp_path / "pipe")]):
        fake_runtime.loads.clear()
        result = bench("--kinds", "chat", *arguments)
        assert result.code == 2 and arguments[1] in result.err
        assert not fake_runtime.loads
    assert (tmp_path / "pipe").is_fifo()


def test_a_record_that_cannot_be_written_leaves_the_figures(bench, tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "r.jsonl")

    monkeypatch.setattr("edgespec_apps.recording.write_whole", full)
    result = bench("--kinds", "chat", "--repeats", "1", "--record", str(tmp_path / "r.jsonl"), "--json")
    assert result.code == 1 and "No space left" in result.err
    assert json.loads(result.out)["identical"] == "1/1"


def test_without_json_a_table(bench):
    result = bench("--kinds", "chat", "--repeats", "1")
    assert result.code == 0
    assert "chat" in result.out and "ratio" in result.out and "median over prompts" in result.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--repeats", "0"], "repeats"),
        (["--peer", "other"], "llama.cpp"),
        (["--policy", "sometimes"], "sometimes"),
        (["--rivals", "fixed:2,sometimes"], "sometimes"),
        (["--peer", "llama.cpp", "--peer-gguf", "/no/file.gguf"], "/no/file.gguf"),
    ],
)
def test_bad_arguments(bench, arguments, says):
    result = bench("--kinds", "chat", *arguments)
    assert result.code == 2
    assert says in result.err


@pytest.mark.parametrize("kinds", ["poems", "chat,poems", ","])
def test_unknown_kinds(command, kinds):
    result = command("bench", "--kinds", kinds)
    assert result.code == 2
    assert "code-edit, chat, json, summary" in result.err


def test_a_peer_that_is_not_installed_is_null_with_a_note(bench, tmp_path: Path):
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    result = bench(
        "--kinds", "chat", "--repeats", "1", "--json", "--peer", "llama.cpp", "--peer-gguf", str(gguf), "--peer-python", "/no/python"
    )
    assert result.code == 0
    assert json.loads(result.out)["peer"] is None
    assert "measuring without a peer: cannot start /no/python" in result.err


FAKE_LLAMA = """
__version__ = "9.9"
class Llama:
    def __init__(self, **options):
        assert options["n_threads"] == 2 and options["n_ctx"] == 100
        self.lookup = options["draft_model"] is not None
    def reset(self): pass
    def token_eos(self): return 7
    def generate(self, ids, **options):
        yield from [len(ids), 5 if self.lookup else 6, 7, 8]
"""


def test_the_peer_answers_through_its_pipe(tmp_path: Path, monkeypatch):
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE_LLAMA)
    (package / "llama_speculative.py").write_text("class LlamaPromptLookupDecoding:\n    def __init__(self, num_pred_tokens): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LlamaPeer(tmp_path / "model.gguf", context=100, threads=2) as peer:
        assert peer.version == "9.9"
        assert peer.runner(lookup=False)([1, 2, 3], 10).token_ids == (3, 6, 7)  # ends at its end token
        assert peer.runner(lookup=True)([1, 2], 2).token_ids == (2, 5)


def test_the_peer_says_why_it_cannot_run(tmp_path: Path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(PeerUnavailable, match="ImportError: no such library"):
        LlamaPeer(tmp_path / "model.gguf", context=100, threads=2, python=sys.executable)


def test_bundled_prompts():
    prompts = load_prompts(KINDS)
    for kind in KINDS:
        texts = [prompt.text for prompt in prompts if prompt.kind == kind]
        assert len(set(texts)) == len(texts) >= 5
    assert [prompt.kind for prompt in prompts[:4]] == list(KINDS), "kinds take turns"
    for prompt in prompts:
        if prompt.kind == "code-edit":
            source = prompt.text.split("```")[1].splitlines()[1:]
            assert 40 <= len(source) <= 80, prompt.name


def test_fewer_prompts_of_each_kind():
    assert [prompt.kind for prompt in load_prompts(["json", "chat"], 2)] == ["json", "chat", "json", "chat"]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7])
def test_nobody_always_runs_after_the_same_one(n):
    names = [f"r{i}" for i in range(n)]
    turns = orders(names)
    assert turns[0] == names and all(sorted(turn) == names for turn in turns)
    places = Counter((name, at) for turn in turns for at, name in enumerate(turn))
    assert len(places) == n * n and len(set(places.values())) == 1
    behind = Counter(pair for turn in turns for pair in pairwise(turn))
    assert len(behind) == n * (n - 1) and len(set(behind.values())) <= 1


def test_runners_take_turns_and_turn_around():
    order: list[str] = []
    runners = {name: (lambda ids, n, name=name: order.append(name) or run(1.0)) for name in ("plain", "spec")}
    prompts = [(Prompt("chat", name, ""), [1]) for name in "ab"]
    samples = measure(prompts, runners, repeats=2, max_tokens=4)
    assert order == ["plain", "spec", "spec", "plain", "spec", "plain", "plain", "spec"]
    assert [(s.prompt.name, s.repeat) for s in samples] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_medians_over_repeats_then_over_prompts():
    samples = [sample("a", 0, 10, 30), sample("a", 1, 12, 24), sample("b", 0, 20, 20), sample("b", 1, 0, 0), sample("c", 0, 10, 10)]
    assert tok_s(samples, "plain") == 11  # of 11, 20, 10; an answer too short to time does not count
    assert ratio(samples, "spec", ["plain"]) == 1  # of 27/11, 1, 1
    assert tok_s([sample("a", 0, 0, 0)], "plain") is None


def test_ratio_to_the_best_is_per_prompt():
    samples = [sample("a", 0, 1, 30, x=10, y=20), sample("b", 0, 1, 30, x=60, y=20)]
    assert ratio(samples, "spec", ["x", "y"]) == pytest.approx((30 / 20 + 30 / 60) / 2)


def test_prefill_and_context():
    assert prefill_tok_s([sample("a", 0, 1, 1)], "plain") == 20
    assert mean_context([sample("a", 0, 1, 1)]) == 11


@pytest.mark.parametrize(("last", "spoiled"), [(10.0, False), (9.0, False), (8.0, True), (12.0, True)])
def test_drift_compares_the_thirds_kind_by_kind(last, spoiled):
    """ESB-70: a change beyond 15 % between the first and the last third is flagged."""
    speeds = [10.0, 10.0, 10.0, 10.0, last, last]
    samples = [s for speed in speeds for s in (sample("a", 0, speed, 1), sample("b", 0, 5 * speed, 1, kind="json"))]
    found = drift(samples)
    assert found and found.spoiled is spoiled
    assert found.change == pytest.approx(last / 10 - 1)


def test_too_few_samples_say_nothing_about_drift():
    assert drift([sample("a", 0, 10, 1)] * 5) is None


def test_bandwidth_counts_bytes_moved():
    ticks = iter(range(1000))
    measured = machine.bandwidth_gbs(threads=1, buffer_bytes=1 << 20, rounds=1, clock=lambda: next(ticks))
    assert measured == pytest.approx((1 << 20) / 1e9)  # one tick is one second


def test_presets_are_noticed():
    assert machine.presets({"OMP_NUM_THREADS": "1", "HOME": "/", "OPENBLAS_CORETYPE": "x"}) == {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_CORETYPE": "x",
    }
