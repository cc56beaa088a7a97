"""`edgespec bench`: plain against speculative decoding, prompt by prompt, beside what the memory allows."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps import machine
from edgespec_apps.console import in_background, progress_bar, say
from edgespec_apps.measure import (
    KINDS,
    Prompt,
    Run,
    Runner,
    Sample,
    drift,
    load_prompts,
    mean_context,
    measure,
    prefill_tok_s,
    ratio,
    tok_s,
)
from edgespec_apps.options import AsJson, MaxTokens, ModelOptions, check_policy
from edgespec_apps.peer import LlamaPeer, PeerUnavailable

if TYPE_CHECKING:
    from edgespec.core.plan import Knobs
    from edgespec.orchestrator.runtime import Runtime

SCHEMA = "edgespec.bench/1"
_WARM_UP_TOKENS = 16
_SPARE_TOKENS = 64  # room beyond prompt and answer, for a peer that drafts past the end
_QUIET_LOAD = 0.5  # runnable tasks per core above which figures mislead


def bench(
    model: ModelOptions,
    kinds: Annotated[str, typer.Option("--kinds", metavar="A,B", help="Kinds of prompts, comma-separated.")] = ",".join(KINDS),
    first: Annotated[
        int | None, typer.Option("--prompts", min=1, metavar="N", help="Only the first N prompts of each kind (default: all).")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="R", help="Times that every prompt is answered.")] = 3,
    max_tokens: MaxTokens = 256,
    rivals: Annotated[
        str, typer.Option("--rivals", metavar="A,B", help="Other policies to measure in turns with --policy, such as fixed:4,fixed:8.")
    ] = "",
    peer: Annotated[str | None, typer.Option("--peer", metavar="llama.cpp", help="Measure this runtime beside ours, in turns.")] = None,
    peer_gguf: Annotated[
        Path | None, typer.Option("--peer-gguf", metavar="FILE", help="The peer's model (default: the file ours was converted from).")
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option("--peer-python", metavar="PATH", help="Python that has the peer's binding.", show_default="this one"),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="FILE", help="Write what each drafter would have guessed along the plain answers, for `edgespec simulate`."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure plain and speculative decoding in turns on the same prompts, greedily.

    Speeds are decoded tokens per second from the first token on, as medians over prompts of each prompt's median over its
    repeats. The ratio is the median over prompts of each prompt's own ratio.
    """
    prompts = load_prompts(_listed(kinds), first)
    if peer not in (None, "llama.cpp"):
        raise ValueError(f"--peer knows llama.cpp only, got {peer!r}")
    if peer is None and (peer_gguf or peer_python):
        raise ValueError("--peer-gguf and --peer-python belong to --peer llama.cpp; add it, or leave them out")
    if record is not None:
        _check_file(record)
    for name in _listed(rivals):
        check_policy(name)
    threads = model.threads or machine.cores()
    before = machine.load_average()
    if before[0] > _QUIET_LOAD * machine.cores():
        say(f"the machine is busy (load average {before[0]:.1f} on {machine.cores()} cores): trust ratios, not speeds")
    bandwidth_gbs = machine.bandwidth_gbs(threads=threads)
    with ExitStack() as stack:
        runtime = stack.enter_context(model.load())
        encoded = [(prompt, encode(runtime, prompt.text)) for prompt in prompts]
        needed = max(len(ids) for _, ids in encoded) + max_tokens + _SPARE_TOKENS
        room = model.max_context or min(needed, runtime.spec.max_context)
        knobs = model.knobs()
        runners = {"plain": runner(runtime, model, room, "fixed:0"), "spec": runner(runtime, model, room, model.policy, knobs)}
        others = {name: runner(runtime, model, room, name, _as_far_as_it_plans(knobs, name)) for name in _listed(rivals)}
        runners |= others
        rival = stack.enter_context(_peer(runtime, peer_gguf, peer_python or sys.executable, room, threads)) if peer else None
        if rival:
            runners |= {"peer_plain": rival.runner(lookup=False), "peer_lookup": rival.runner(lookup=True)}
        samples = _run(encoded, runners, repeats=repeats, max_tokens=max_tokens)
        spec = runtime.spec
        result: dict[str, Any] = {
            "schema": SCHEMA,
            "machine": machine.describe() | {"threads": threads, "load_average_before": before},
            "model": spec.name,
            "draft": runtime.draft_name,
            "engine": runtime.engine_name,
            "policy": model.policy,
            "repeats": repeats,
            "max_tokens": max_tokens,
            **report(samples, weight_bytes=spec.weight_bytes, kv_bytes_per_token=spec.kv_bytes_per_token, bandwidth_gbs=bandwidth_gbs),
            "rivals": rivals_report(samples, list(others)) if others else None,
            "peer": peer_report(samples, rival.version) if rival else None,
        }
        try:
            if record is not None:
                which = f"--kinds {kinds}{f' --prompts {first}' if first else ''}"
                _record(runtime, model, encoded, samples, room=room, max_tokens=max_tokens, which=which, file=record)
        finally:  # a full disk does not take the measurement with it, nor does Ctrl-C
            _show(result, as_json=as_json)


def _show(result: Mapping[str, Any], *, as_json: bool) -> None:
    if result["drift"] and result["drift"]["spoiled"]:
        say(
            f"plain speed changed by {result['drift']['change']:+.0%} during the run (heat or other work): measure again on a quiet machine"
        )
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        print_table(result)


def _check_file(record: Path) -> None:
    """Raise ValueError now rather than after minutes of work. What is written takes the place of what is there, a device's too."""
    if not record.absolute().parent.is_dir():
        raise ValueError(f"--record: there is no folder {record.absolute().parent}; make it first")
    if record.exists() and not record.is_file():
        raise ValueError(f"--record: {record} is there and is no file; name another")


def _listed(text: str) -> list[str]:
    """Comma-separated names, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def encode(runtime: Runtime, text: str) -> list[int]:
    """The ids that a user message becomes, so that every runner reads the very same prompt."""
    tokenizer = runtime.tokenizer
    if tokenizer.has_template:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text, bos=tokenizer.add_bos)


def _as_far_as_it_plans(knobs: Knobs, policy: str) -> Knobs:
    """A fixed length saves no energy: among rivals it is measured as it is, rather than refused as it would be alone."""
    from edgespec.scheduling.parse import GOVERNED

    return replace(knobs, energy="balanced") if policy.startswith("fixed") and not policy.endswith(GOVERNED) else knobs


def runner(runtime: Runtime, model: ModelOptions, max_context: int, policy: str, knobs: Knobs | None = None) -> Runner:
    """Answers greedily in a session of its own each time: nothing read before may shorten the work."""

    def run(prompt_ids: Sequence[int], max_tokens: int) -> Run:
        with runtime.session(policy=policy, verify=model.verify.value, max_context=max_context, knobs=knobs) as session:
            answer = session.generate(prompt_ids, max_tokens=max_tokens)
        stats = answer.stats
        return Run(
            token_ids=answer.token_ids,
            tok_s=stats.tok_s,
            ttft_s=stats.ttft_s,
            rounds=stats.rounds,
            drafted=stats.drafted,
            kept=stats.kept,
            overhead_ms=sum(trace.overhead_ms for trace in answer.traces),
            busy_ms=sum(trace.round_ms + trace.text_ms for trace in answer.traces),
        )

    return run


@contextmanager
def _peer(runtime: Runtime, gguf: Path | None, python: str, context: int, threads: int) -> Generator[LlamaPeer | None]:
    """The peer on the file that our package was made from; None, with a line that says why, if it cannot run here."""
    file = gguf or _source_file(runtime)
    if not file.is_file():
        raise ValueError(f"the peer's model {file} does not exist; give --peer-gguf FILE")
    try:
        rival = LlamaPeer(file, context=context, threads=threads, python=python)
    except PeerUnavailable as error:
        say(f"measuring without a peer: {error}")
        yield None
        return
    with rival:
        yield rival


def _source_file(runtime: Runtime) -> Path:
    from edgespec.orchestrator.store import source_folder

    source = runtime.manifest.source if runtime.manifest else {}
    recorded = Path(str(source.get("pull", "")))  # a path, if the package was made from a local file
    folder = source_folder(runtime.spec.name)
    return next((file for file in (recorded, *sorted(folder.glob("*.gguf"))) if file.is_file()), folder / "*.gguf")


def _run(prompts: Sequence[tuple[Prompt, Sequence[int]]], runners: Mapping[str, Runner], *, repeats: int, max_tokens: int) -> list[Sample]:
    """Warm up, then measure on a thread of its own, so that Ctrl-C is served at once."""

    def work() -> list[Sample]:
        for run in runners.values():
            run(prompts[0][1], _WARM_UP_TOKENS)
        with progress_bar("measuring") as advance:
            return measure(
                prompts, runners, repeats=repeats, max_tokens=max_tokens, on_sample=lambda done, total: advance("samples", done, total)
            )

    return in_background(work)


def _record(
    runtime: Runtime,
    model: ModelOptions,
    prompts: Sequence[tuple[Prompt, Sequence[int]]],
    samples: Sequence[Sample],
    *,
    room: int,
    max_tokens: int,
    which: str,
    file: Path,
) -> None:
    """The plain answers of the first round of repeats, with every drafter along them. `which`: the options that chose the prompts."""
    from edgespec_apps import recorder, recording

    known = [(p.kind, ids, sample.runs["plain"].token_ids) for (p, ids), sample in zip(prompts, samples, strict=False)]
    recipe = _recipe(runtime, model)
    chosen = f"--model {runtime.spec.name}{f' --recipe {recipe}' if recipe else ''} --draft {runtime.draft_name}"
    command = f"edgespec bench {chosen} {which} --max-tokens {max_tokens} --repeats 1 --record FILE"
    made = in_background(lambda: recorder.record(runtime, known, recipe=recipe, max_tokens=max_tokens, max_context=room, command=command))
    recording.save(made, file)
    say(f"recorded {len(known)} answers in {file}")


def _recipe(runtime: Runtime, model: ModelOptions) -> str:
    """The conversion that answered: the one asked for, else the package's first."""
    asked = model.recipe or (model.model.rpartition("@")[2] if "@" in model.model else "")
    return asked or (runtime.manifest.artifacts[0].recipe if runtime.manifest else "")


def report(samples: Sequence[Sample], *, weight_bytes: int, kv_bytes_per_token: int, bandwidth_gbs: float) -> dict[str, Any]:
    """The figures of the JSON line that come from our own runs."""

    def ceiling(some: Sequence[Sample]) -> float:
        """Plain tok/s if each token cost one reading of the weights and of the cache, and nothing else."""
        return bandwidth_gbs * 1e9 / (weight_bytes + kv_bytes_per_token * mean_context(some))

    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(sample.prompt.kind for sample in samples):
        some = [sample for sample in samples if sample.prompt.kind == kind]
        spec = [sample.runs["spec"] for sample in some]
        per_round = sum(len(run.token_ids) for run in spec) / max(1, sum(run.rounds for run in spec))
        kinds[kind] = {
            "plain_tok_s": tok_s(some, "plain"),
            "spec_tok_s": tok_s(some, "spec"),
            "ratio": ratio(some, "spec", ["plain"]),
            "kept_per_round": sum(run.kept for run in spec) / max(1, sum(run.rounds for run in spec)),
            "drafted_per_round": sum(run.drafted for run in spec) / max(1, sum(run.rounds for run in spec)),
            "identical": f"{sum(sample.identical for sample in some)}/{len(some)}",
            "plain_ceiling_tok_s": ceiling(some),
            "spec_ceiling_tok_s": ceiling(some) * per_round,  # one reading of the weights per round
            "samples": [_sample(sample) for sample in some],
        }
    spec = [sample.runs["spec"] for sample in samples]
    change = drift(samples)
    return {
        "ratio_is": "median over prompts of (median spec tok/s over repeats / median plain tok/s over repeats)",
        "kinds": kinds,
        "identical": f"{sum(sample.identical for sample in samples)}/{len(samples)}",
        "prefill_tok_s": prefill_tok_s(samples, "plain"),
        "overhead_share": sum(run.overhead_ms for run in spec) / max(1e-9, sum(run.busy_ms for run in spec)),
        "bandwidth_gbs": bandwidth_gbs,
        "mean_context": mean_context(samples),
        "weight_bytes": weight_bytes,
        "ceiling_tok_s": ceiling(samples),
        "drift": None if change is None else {"change": change.change, "spoiled": change.spoiled},
    }


def peer_report(samples: Sequence[Sample], version: str) -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(sample.prompt.kind for sample in samples):
        some = [sample for sample in samples if sample.prompt.kind == kind]
        kinds[kind] = {
            "plain_tok_s": tok_s(some, "peer_plain"),
            "lookup_tok_s": tok_s(some, "peer_lookup"),
            "our_plain_over_plain": ratio(some, "plain", ["peer_plain"]),
            "our_spec_over_best": ratio(some, "spec", ["peer_plain", "peer_lookup"]),
        }
    return {"name": "llama.cpp", "binding_version": version, "prefill_tok_s": prefill_tok_s(samples, "peer_plain"), "kinds": kinds}


def rivals_report(samples: Sequence[Sample], policies: Sequence[str]) -> dict[str, Any]:
    """Per kind: each policy's speed over plain decoding, and ours over the best of them on that kind."""
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(sample.prompt.kind for sample in samples):
        some = [sample for sample in samples if sample.prompt.kind == kind]
        ratios = {name: ratio(some, name, ["plain"]) for name in policies}
        best = max(policies, key=lambda name: ratios[name] or 0.0)
        kinds[kind] = {"ratios": ratios, "best": best, "ours_over_best": ratio(some, "spec", [best])}
    return {"kinds": kinds}


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt.name,
        "repeat": sample.repeat,
        "prompt_tokens": sample.prompt_tokens,
        "identical": sample.identical,
        "order": list(sample.runs),
        "runs": {name: {"tokens": len(run.token_ids), "tok_s": run.tok_s, "ttft_s": run.ttft_s} for name, run in sample.runs.items()},
        "rounds": sample.runs["spec"].rounds,
        "drafted": sample.runs["spec"].drafted,
        "kept": sample.runs["spec"].kept,
    }


def print_table(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result['model']} on {result['engine']}, draft {result['draft']}, policy {result['policy']} (tok/s; ceilings in brackets)"
    )
    for column in ("kind", "plain", "speculative", "ratio", "kept/round", "identical"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    rivals, peer = result["rivals"], result["peer"]
    for column in (*rivals["kinds"][next(iter(rivals["kinds"]))]["ratios"], "over best") if rivals else ():
        table.add_column(column, justify="right")
    for column in ("llama.cpp", "its lookup", "plain ratio", "ratio to its best") if peer else ():
        table.add_column(column, justify="right")
    for kind, figures in result["kinds"].items():
        others = rivals["kinds"][kind] if rivals else None
        rival = peer["kinds"][kind] if peer else {}
        table.add_row(
            kind,
            f"{_figure(figures['plain_tok_s'])} ({_figure(figures['plain_ceiling_tok_s'])})",
            f"{_figure(figures['spec_tok_s'])} ({_figure(figures['spec_ceiling_tok_s'])})",
            _figure(figures["ratio"], 2),
            _figure(figures["kept_per_round"], 2),
            figures["identical"],
            *(_figure(value, 2) for value in ([*others["ratios"].values(), others["ours_over_best"]] if others else ())),
            *(_figure(value, 2 if "over" in name else 1) for name, value in rival.items()),
        )
    Console().print(table)
    print(
        f"prefill {_figure(result['prefill_tok_s'])} tok/s, overhead {result['overhead_share']:.1%} of round time, memory "
        f"{result['bandwidth_gbs']:.1f} GB/s, ceiling {_figure(result['ceiling_tok_s'])} tok/s at context {result['mean_context']:.0f}"
    )
    print(f"Ratio: {result['ratio_is']}.")


def _figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
