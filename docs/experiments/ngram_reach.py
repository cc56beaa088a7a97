"""How far should a matched passage be followed? Replays a model's own answers against n-gram drafters of different trust.

    python docs/experiments/ngram_reach.py smollm2-135m [--tokens 160]

Prints, per prompt kind, expected speed over plain decoding by trust and draft limit: tokens / Σ cost of the rows scored, with the
cost of m rows measured first, on this machine. Answers and replay are exact (the model is width-invariant); only the costs are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import edgespec
from edgespec.core.engine import Engine, TokenBatch
from edgespec.drafting import ngram
from edgespec_apps.measure import KINDS, load_prompts
from edgespec_apps.recorder import ngram_track
from edgespec_apps.recording import RecordedAnswer

TRUSTS = (1.0, 1.5, 2.0, 3.0, 1e9)
LIMITS = (4, 8, 12, 16)


def row_costs(engine: Engine, prompt: Sequence[int], *, rows: int = 17, repeats: int = 9) -> list[float]:
    """Cost of scoring m rows over the cost of one, m = 1..rows, at the context of `prompt`; interleaved, medians."""
    cache = engine.new_cache(len(prompt) + rows)
    engine.forward([(TokenBatch.chain(prompt, scored=0), cache)])
    cache.commit(range(len(prompt)))
    seconds: dict[int, list[float]] = {m: [] for m in range(1, rows + 1)}
    for _ in range(repeats):
        for m in seconds:
            batch = TokenBatch.chain([prompt[0]] * m)
            began = perf_counter()
            engine.forward([(batch, cache)])[0].logits.argmax()
            seconds[m].append(perf_counter() - began)
    return [median(seconds[m]) / median(seconds[1]) for m in seconds]


def replay(answer: RecordedAnswer, limit: int, costs: Sequence[float]) -> float:
    """Speed over plain decoding if at most `limit` tokens had been guessed a round."""
    position, cost = 0, 0.0
    while position < answer.tokens:
        drafted, _, position = answer.step("ngram", position, min(limit, answer.tokens - position - 1))
        cost += costs[drafted]
    return answer.tokens / cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=160)
    options = parser.parse_args()
    with edgespec.load(options.model, engine="onnx", draft="ngram") as runtime:
        session = runtime.session(policy="fixed:8", max_context=min(4096, runtime.spec.max_context))
        answers: dict[str, list[tuple[list[int], tuple[int, ...]]]] = {kind: [] for kind in KINDS}
        for prompt in load_prompts(list(KINDS)):
            ids = runtime.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            answers[prompt.kind].append((ids, session.generate(ids, max_tokens=options.tokens).token_ids))
        costs = row_costs(runtime.target, answers[KINDS[0]][0][0][:256])
    print("cost of m rows:", " ".join(f"{m}:{cost:.2f}" for m, cost in enumerate(costs, 1)))
    for kind, pairs in answers.items():
        for trust in TRUSTS:
            ngram.TRUST = min(trust, 1e6)  # the module's own setting, for this replay only
            recorded = [RecordedAnswer(kind, len(prompt), len(answer), {"ngram": ngram_track(prompt, answer)}) for prompt, answer in pairs]
            figures = (f"{limit}: {median(replay(answer, limit, costs) for answer in recorded):.2f}" for limit in LIMITS)
            print(f"{kind:10} trust {trust:<6g} limit {'  '.join(figures)}")


if __name__ == "__main__":
    main()
