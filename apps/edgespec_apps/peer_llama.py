"""llama.cpp as a subprocess: one JSON line in, one out. Run by path with any Python that has `llama_cpp`; imports nothing of ours.

First line out: {"version"} or {"error"}. Line in: {"token_ids", "max_tokens", "lookup"}; line out: {"token_ids", "tok_s", "ttft_s"}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from typing import Any


def build(llama_cpp: Any, options: argparse.Namespace, *, lookup: bool) -> Any:
    """One loaded model. Its lookup decoder needs logits of every row, which would slow plain decoding: hence two of them."""
    draft = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(num_pred_tokens=10) if lookup else None
    return llama_cpp.Llama(
        model_path=options.gguf,
        n_ctx=options.context,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        draft_model=draft,
        logits_all=lookup,  # else the binding has no room for the drafted rows of a long context
        verbose=False,
    )


def answer(llama: Any, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
    """Greedy continuation, timed as ours is: speed counts from the first token on."""
    llama.reset()  # forget the last prompt: every answer reads its own
    out: list[int] = []
    start = first = time.perf_counter()
    last = start
    for token in llama.generate(token_ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        last = time.perf_counter()
        if not out:
            first = last
        out.append(int(token))
        if token == llama.token_eos() or len(out) == max_tokens:
            break
    span = last - first
    return {"token_ids": out, "tok_s": (len(out) - 1) / span if len(out) > 1 and span > 0 else 0.0, "ttft_s": first - start}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    try:
        llama_cpp = importlib.import_module("llama_cpp")
        models = {lookup: build(llama_cpp, options, lookup=lookup) for lookup in (False, True)}
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(answer(models[job["lookup"]], job["token_ids"], job["max_tokens"])), flush=True)


if __name__ == "__main__":
    main()
