"""Does the adaptive policy find its plans on a machine that drifts, and what should a token accepted now be worth to it?

    python docs/experiments/drifting_machine.py [--seeds 6] [--answers 48] [--recording FILE]

Recorded answers follow each other, guessed by n-grams; a pass costs what a curve says, times 1 + context/2500, times a slow drift
(10 % over some 50 rounds), times 6 % of noise, and one in a hundred takes twice as long. Prints per curve and kind the adaptive policy's
speed over the best fixed length's, both by the undisturbed cost of what they decided, for several values of `adaptive.FIRST_TOKEN`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from edgespec.core.device import DeviceProfile
from edgespec.core.plan import Knobs
from edgespec.core.policy import RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling import adaptive
from edgespec.scheduling.parse import parse_policy
from edgespec_apps import recording
from edgespec_apps.recording import LONGEST, Recording

DRAFTER = "ngram"
CURVES = {  # rows -> cost, in passes over one row: as a small model on two processor cores has it, and three steeper ones
    "flat": {1: 1.0, 2: 1.16, 4: 1.38, 5: 1.42, 8: 1.8, 10: 1.94, 13: 2.25, 17: 2.5},
    "middle": {1: 1.0, 4: 1.21, 8: 1.55, 16: 2.34, 17: 2.44},
    "rising": {1: 1.0, 4: 1.3, 8: 1.93, 16: 3.19, 17: 3.35},
    "steep": {1: 1.0, 2: 1.5, 4: 2.2, 8: 3.4, 16: 6.0, 17: 6.4},
}
FIXED = tuple(f"fixed:{n}" for n in (1, 2, 4, 8, 16))
ROW_MS = 7.0


def play(made: Recording, policy: str, curve: dict[int, float], seed: int, answers: int) -> dict[str, tuple[float, int]]:
    """Kind -> (undisturbed cost in ms, tokens) of the first so many answers."""
    plan_of, rng = parse_policy(policy), np.random.default_rng(seed)
    profile, knobs, history, drift = DeviceProfile.generic(), Knobs(), list[RoundTrace](), 0.0
    cost, tokens = defaultdict[str, float](float), defaultdict[str, int](int)
    for answer in islice(cycle(made.answers), answers):
        track, position, number = answer.tracks[DRAFTER], 0, 0
        while position < answer.tokens:
            known, room = answer.prompt_tokens + position, made.max_tokens - position - 1
            offer = track.offer(DRAFTER, position, min(room, LONGEST))
            plan = plan_of(history, RoundState(context_len=known, room=room, drafter=DRAFTER, offers=(offer,)), profile, knobs)
            drafted, kept, after = answer.step(DRAFTER, position, max(0, min(plan.draft_tokens, room, LONGEST)))
            trial = track.trial(offer, position, after - position)
            usual = ROW_MS * float(np.interp(drafted + 1, list(curve), list(curve.values()))) * (1.0 + known / 2500)
            drift = 0.98 * drift + 0.1 * (1.0 - 0.98**2) ** 0.5 * float(rng.standard_normal())
            noise = max(0.7, 1.0 + 0.06 * float(rng.standard_normal())) * (2.0 if rng.random() < 0.01 else 1.0)
            ms = usual * float(np.exp(drift)) * noise
            history.append(
                RoundTrace(
                    round=number,
                    context_len=known - 1,
                    drafter=DRAFTER,
                    planned=plan.draft_tokens,
                    drafted=drafted,
                    kept=kept,
                    emitted=after - position,
                    rows=drafted + 1,
                    draft_ms=0.02,
                    verify_ms=ms,
                    round_ms=ms,
                    reason=plan.reason,
                    offers=(offer,),
                    trials=() if trial is None else (trial,),
                )
            )
            cost[answer.kind] += usual
            tokens[answer.kind] += after - position
            position, number = after, number + 1
    return {kind: (cost[kind], tokens[kind]) for kind in cost}


def speeds(made: Recording, policy: str, curve: dict[int, float], seeds: Sequence[int], answers: int) -> dict[str, float]:
    """Kind -> tokens per ms."""
    runs = [play(made, policy, curve, seed, answers) for seed in seeds]
    return {kind: sum(run[kind][1] for run in runs) / sum(run[kind][0] for run in runs) for kind in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--answers", type=int, default=48)
    parser.add_argument("--recording", type=Path, help="default: the one that comes with the program")
    options = parser.parse_args()
    made = recording.load(options.recording) if options.recording else recording.bundled()
    for name, curve in CURVES.items():
        fixed = [speeds(made, policy, curve, [0], options.answers) for policy in FIXED]
        best = {kind: max(run[kind] for run in fixed) for kind in sorted(fixed[0])}
        for first_token in (0.0, 0.3, 0.6):
            adaptive.FIRST_TOKEN = first_token  # pyright: ignore[reportConstantRedefinition]  # an experiment
            ours = speeds(made, "adaptive", curve, range(options.seeds), options.answers)
            shares = {kind: ours[kind] / best[kind] for kind in best}
            text = "  ".join(f"{kind} {share:.3f}" for kind, share in shares.items())
            print(f"{name:7} FIRST_TOKEN {first_token:.1f}  {text}  mean {np.mean(list(shares.values())):.3f}", flush=True)


if __name__ == "__main__":
    main()
