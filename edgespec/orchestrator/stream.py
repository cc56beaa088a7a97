"""Ids become text as they come, and the text ends where a stop string says so."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from edgespec.orchestrator.tokenizer import Tokenizer


class Detokenizer:
    """One answer's ids → text, never half a character. The pieces joined are `tokenizer.decode(ids)`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.leading_space

    def push(self, token_id: int) -> str:
        """The text that is certain now. An invalid byte is U+FFFD as soon as no later byte can save it."""
        raw = self._tokenizer.visible_bytes(token_id)
        if self._strip and raw:
            raw = raw.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What is left at the end of the answer: U+FFFD for half a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text before the stop string that is complete first (the longest, if several end together).

    An Aho-Corasick automaton (Aho and Corasick 1975): each character costs a constant amortised time, whatever the stop
    strings, and the depth of its state is exactly the number of characters that may yet become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends in this state, 0 for none
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()
        self._state = 0
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is certain to precede any stop string, and whether one is complete. After that, nothing more comes."""
        if self._stopped:
            return "", True
        self._held += text
        for end in range(len(self._held) - len(text), len(self._held)):
            self._state = self._step(self._state, self._held[end])
            if length := self._match[self._state]:
                self._stopped = True
                return self._take(end + 1 - length), True
        return self._take(len(self._held) - self._depth[self._state]), False

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        return "" if self._stopped else self._take(len(self._held))

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, 1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(depth)
                self._match.append(0)
            state = self._next[state][character]
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper suffix of a state that is a state too."""
        queue = list(self._next[0].values())
        for state in queue:
            for character, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], character)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)
