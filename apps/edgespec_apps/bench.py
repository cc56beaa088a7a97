"""`edgespec bench`: plain against speculative decoding, prompt by prompt, beside what the memory allows."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps import machine
from edgespec_apps.console import each_in_background, say
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
from edgespec_apps.options import AsJson, MaxTokens, ModelOptions
from edgespec_apps.peer import LlamaPeer, PeerUnavailable

if TYPE_CHECKING:
    from edgespec.orchestrator.session import Runtime

SCHEMA = "edgespec.bench/1"
_WARM_UP_TOKENS = 16


def bench(
    model: ModelOptions,
    kinds: Annotated[str, typer.Option("--kinds", metavar="A,B", help="Kinds of prompts, comma-separated.")] = ",".join(KINDS),
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="R", help="Times that every prompt is answered.")] = 3,
    max_tokens: MaxTokens = 128,
    peer: Annotated[str | None, typer.Option("--peer", metavar="llama.cpp", help="Measure this runtime beside ours, in turns.")] = None,
    peer_gguf: Annotated[
        Path | None, typer.Option("--peer-gguf", metavar="FILE", help="The peer's model [default: the file ours was converted from].")
    ] = None,
    peer_python: Annotated[
        str, typer.Option("--peer-python", metavar="PATH", help="Python that has the peer's binding.", show_default="this one")
    ] = sys.executable,
    as_json: AsJson = False,
) -> None:
    """Measure plain and speculative decoding in turns on the same prompts, greedily.

    Speeds are decoded tokens per second from the first token on, as medians over prompts of each prompt's median over its
    repeats. The ratio is the median over prompts of each prompt's own ratio.
    """
    prompts = load_prompts([kind.strip() for kind in kinds.split(",") if kind.strip()])
    if peer not in (None, "llama.cpp"):
        raise ValueError(f"--peer knows llama.cpp only, got {peer!r}")
    threads = model.threads or machine.cores()
    before = machine.load_average()
    bandwidth_gbs = machine.bandwidth_gbs(threads=threads)
    with ExitStack() as stack:
        runtime = stack.enter_context(model.load())
        encoded = [(prompt, encode(runtime, prompt.text)) for prompt in prompts]
        room = max(len(ids) for _, ids in encoded) + max_tokens + 64
        runners = {"plain": runner(runtime, model, room, policy="fixed:0"), "spec": runner(runtime, model, room, policy=model.policy)}
        rival = stack.enter_context(_peer(runtime, peer_gguf, peer_python, room, threads)) if peer else None
        if isinstance(rival, LlamaPeer):
            runners |= {"peer_plain": rival.runner(lookup=False), "peer_lookup": rival.runner(lookup=True)}
        samples = _run(encoded, runners, repeats=repeats, max_tokens=max_tokens)
        result = report(
            samples,
            weight_bytes=runtime.spec.weight_bytes,
            kv_bytes_per_token=runtime.spec.kv_bytes_per_token,
            bandwidth_gbs=bandwidth_gbs,
        )
        result = {
            "schema": SCHEMA,
            "machine": machine.describe() | {"threads": threads, "load_average_before": before},
            "model": runtime.spec.name,
            "draft": runtime.draft_name,
            "engine": runtime.engine_name,
            "policy": model.policy,
            "repeats": repeats,
            "max_tokens": max_tokens,
            **result,
            "peer": peer_report(samples, rival.version) if rival else None,
        }
