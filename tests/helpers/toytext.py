"""A tokenizer of sixteen letters and a runtime of toy parts, so that whole sessions run without a model."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.orchestrator.runtime import Runtime
from edgespec.orchestrator.text import Tokenizer
from tests.helpers.toys import ToyEngine

LETTERS = "abcdefghijklmno"  # ids 0..14; 15 is the control token <e>


class LetterVocabulary:
    """One id per letter; `words` replaces the bytes of some ids."""

    leading_space = False

    def __init__(self, words: dict[int, bytes] | None = None) -> None:
        self.pieces = [letter.encode() for letter in LETTERS] + [b"<e>"]
        for token, raw in (words or {}).items():
            self.pieces[token] = raw
        self.control_ids = frozenset({15})

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        return [LETTERS.index(c) if c in LETTERS else 0 for c in text]


def letter_tokenizer(*, stop_ids: Sequence[int] = (15,), words: dict[int, bytes] | None = None, template: str | None = None) -> Tokenizer:
    return Tokenizer(LetterVocabulary(words), vocab_size=16, stop_ids=stop_ids, chat_template=template)


def toy_runtime(
    target: ToyEngine,
    *,
    draft: str = "ngram",
    draft_engine: ToyEngine | None = None,
    tokenizer: Tokenizer | None = None,
) -> Runtime:
    return Runtime(target, tokenizer or letter_tokenizer(), draft=draft, draft_engine=draft_engine)
