"""Do the policies keep up with the best fixed length on recorded text, on five chips in their cases?

    python docs/experiments/simulated_scenes.py [--minutes 10] [--seed 0] [--recording FILE] [--scene N]

Prints what the text is like (share of guesses right where so many before them were, and of positions with an offer), then,
per scene, each policy's tokens, its share of the best fixed length's, plan flips and wasted drafts. Each scene is what
`edgespec simulate --profile CHIP --case CASE --model SIZE --draft SIZE --json` runs, with fixed:16 beside the usual policies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from edgespec_apps import recording
from edgespec_apps.recording import LONGEST, Recording, Track
from edgespec_apps.simulation import DEFAULT_POLICIES, Scene, compare
from edgespec_apps.texts import Recorded
from edgespec_device_profiles import cooling, registry
from edgespec_device_profiles.estimates import size_from_name

SCENES = (
    ("apple-m4", "fanless", "8b", "600m"),
    ("apple-a19-pro", "phone", "2b", "300m"),
    ("snapdragon-8-elite", "phone", "3b", "ngram"),
    ("apple-m4-max", "fan", "14b", "600m"),
    ("apple-m2-ultra", "desktop", "14b", "600m"),
)
POLICIES = (*(name for name in DEFAULT_POLICIES if name.startswith("fixed")), "fixed:16", "adaptive", "adaptive+governor")
DEPTHS = (0, 1, 2, 4, 8)


def acceptance(tracks: Sequence[Track], depth: int) -> float:
    """Share of the guesses with `depth` right ones before them that are right too, over all positions where so many are made."""
    made = right = 0
    for track in tracks:
        for position, hits in enumerate(track.right[: len(track.right) - depth]):
            asked = hits >= depth and (track.offered is None or track.offered[position] > depth)
            made += asked
            right += asked and hits > depth
    return right / made if made else float("nan")


def by_level(made: Recording, drafter: str, gamma: int) -> dict[int, tuple[int, float]]:
    """Level of confidence -> (guesses tested, share of them accepted), in rounds of `gamma` tokens over every answer once."""
    reader, left = Recorded(made, (drafter,)).reader(), sum(answer.tokens for answer in made.answers)
    tested: dict[int, int] = {}
    accepted: dict[int, int] = {}
    while left > 0:
        (offer,) = reader.offers(LONGEST)
        drafted, kept = reader.step(drafter, min(gamma, reader.room))
        left -= kept + 1
        tested[offer.confidence] = tested.get(offer.confidence, 0) + min(kept + 1, drafted)
        accepted[offer.confidence] = accepted.get(offer.confidence, 0) + kept
    return {level: (n, accepted[level] / n) for level, n in sorted(tested.items()) if n}


def describe(made: Recording) -> None:
    print(f"{made.command}: {len(made.answers)} answers")
    print(f"{'kind':<12}{'drafter':<9}{'offers':>8}" + "".join(f"{f'after {depth}':>10}" for depth in DEPTHS))
    for kind in dict.fromkeys(answer.kind for answer in made.answers):
        for name in made.drafts:
            tracks = [answer.tracks[name] for answer in made.answers if answer.kind == kind]
            offers = [tokens > 0 for track in tracks for tokens in track.offered or [1] * len(track.right)]
            shares = "".join(f"{acceptance(tracks, depth):>10.2f}" for depth in DEPTHS)
            print(f"{kind:<12}{name:<9}{sum(offers) / len(offers):>8.2f}{shares}")
    for name in made.drafts:
        levels = by_level(made, name, LONGEST if made.answers[0].tracks[name].offered is not None else 4)
        print(f"{name}, share accepted by level of confidence: {', '.join(f'{k}: {share:.2f} of {n}' for k, (n, share) in levels.items())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--scene", type=int, choices=range(len(SCENES)))
    options = parser.parse_args()
    made = recording.load(options.recording) if options.recording else recording.bundled()
    describe(made)
    for chip, case, target, draft in SCENES if options.scene is None else [SCENES[options.scene]]:
        scene = Scene(
            chip=registry.load(chip),
            case=cooling.case(case),
            target=size_from_name(target),
            draft=None if draft == "ngram" else size_from_name(draft),
            text=Recorded(made, ("ngram",) if draft == "ngram" else ("model", "ngram"), options.seed),
            minutes=options.minutes,
        )
        found = compare(scene, POLICIES)
        best = max(row["tokens"] for name, row in found.items() if name.startswith("fixed"))
        print(f"\n{chip}, {case}: {target} with {draft}\n{'policy':<20}{'tokens':>8}{'of best':>9}{'flips':>7}{'wasted':>8}{'peak °C':>9}")
        for name, row in found.items():
            share, (flips, wasted) = row["tokens"] / best, (row["plan_flips"], row["wasted_drafts"])
            print(f"{name:<20}{row['tokens']:>8}{share:>9.3f}{flips:>7}{wasted:>8}{row['peak_c']:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
