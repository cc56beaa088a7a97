"""Text to ids and back, for one model: plain text, chats, and the exact bytes of every id."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Self

from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import TokenizerSpec, check_relative
from edgespec.orchestrator.template import ChatTemplate, Message, TemplateError
from edgespec.orchestrator.vocabulary import Vocabulary, open_vocabulary


class Tokenizer:
    """One model's tokenizer. Safe to share between threads.

    `control_ids` never come out of `encode`, and their spelling never comes out of `decode`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        vocab_size: int,
        add_bos: bool = False,
        bos_id: int | None = None,
        stop_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """`stop_ids`: the first is the model's end-of-text token, which templates know as `eos_token`."""
        if len(vocabulary.pieces) > vocab_size:
            raise ArtifactError(
                f"the tokenizer has {len(vocabulary.pieces)} ids but the model counts {vocab_size}; "
                "they belong to different models, convert the model again"
            )
        self.vocab_size = vocab_size
        self.add_bos = add_bos and bos_id is not None
        self.bos_id = bos_id
        self.stop_ids = tuple(stop_ids)
        special = {*self.stop_ids, *([] if bos_id is None else [bos_id])}
        if bad := sorted(i for i in special if not 0 <= i < vocab_size):
            raise ArtifactError(f"special token ids {bad} lie outside the tokenizer's {vocab_size} ids; convert the model again")
        self.control_ids = vocabulary.control_ids | special
        self.leading_space = vocabulary.leading_space
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces + [b""] * (vocab_size - len(vocabulary.pieces))
        self._template = chat_template

    @classmethod
    def load(cls, folder: Path, spec: TokenizerSpec, vocab_size: int) -> Self:
        """The tokenizer of the model package in `folder`. Raises ArtifactError if a file is missing or damaged."""
        content = _read(folder, spec.file)
        template = None
        if spec.chat_template is not None:
            template = _read(folder, spec.chat_template).decode("utf-8", errors="replace")
        return cls.from_content(
            content,
            kind=spec.kind,
            vocab_size=vocab_size,
            add_bos=spec.add_bos,
            bos_id=spec.bos_id,
            stop_ids=spec.stop_ids,
            chat_template=template,
        )

    @classmethod
    def from_content(
        cls,
        content: bytes,
        *,
        kind: str,
        vocab_size: int,
        add_bos: bool,
        bos_id: int | None,
        stop_ids: Sequence[int],
        chat_template: str | None = None,
    ) -> Self:
        """From the bytes of a `tokenizers` JSON or a sentencepiece model; the names are those of a source's TokenizerFiles."""
        return cls(
            open_vocabulary(kind, content),
            vocab_size=vocab_size,
            add_bos=add_bos,
            bos_id=bos_id,
            stop_ids=stop_ids,
            chat_template=chat_template,
        )

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """The ids of `text`; control tokens spelled in it stay text. `bos` starts with BOS if the model expects one."""
        _check_unicode(text)
        ids = self._vocabulary.encode(text)
        return [self.bos_id, *ids] if bos and self.add_bos and self.bos_id is not None else ids

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """The ids of a chat. Control tokens come from the template alone: those spelled in a message stay text.

        Every spelling in a message is broken with a character that no message contains, the template is rendered and cut
        at the spellings that are left, and the character is taken out again. So an ordinary chat gets the ids of its
        rendered text, and a hostile one cannot open a turn.

        Raises TemplateError (a ValueError) with the template's own message when it refuses these messages.
        """
        _check_messages(messages)
        texts = [text for m in messages for text in (m["role"], m["content"])]
        mark = _unused_character(texts, self._template or "")
        safe: list[Message] = [
            {"role": self._spellings.broken(m["role"], mark), "content": self._spellings.broken(m["content"], mark)} for m in messages
        ]
        rendered = self._chat_template.render(safe, add_generation_prompt=add_generation_prompt)
        _check_unicode(rendered)
        ids: list[int] = []
        for part in self._spellings.split(rendered):
            if isinstance(part, int):
                ids.append(part)
            elif text := part.replace(mark, ""):
                ids += self._vocabulary.encode(text, first=not ids)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without control tokens. Bytes that are no UTF-8 become U+FFFD; ids without a token are empty."""
        raw = b"".join(map(self.visible_bytes, ids))
        if self.leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of an id: a control token's spelling, b"" for an id that has no token."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def visible_bytes(self, token_id: int) -> bytes:
        """What an id adds to an answer: its bytes, b"" for control tokens."""
        return b"" if token_id in self.control_ids else self.token_bytes(token_id)

    def digest(self) -> str:
        """sha256 over id → bytes of every real id: equal for two models exactly if an id means the same to both."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        records = (struct.pack("<II", i, len(piece)) + piece for i, piece in enumerate(self._pieces))
        return hashlib.sha256(b"".join(records)).hexdigest()

    @cached_property
    def _spellings(self) -> Spellings:
        return Spellings({self._spelling(i): i for i in sorted(self.control_ids, reverse=True)})

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateError("this model has no chat template (a base model?); give it plain text instead of a chat")
        bos, eos = (self._spelling(i) if i is not None else "" for i in (self.bos_id, next(iter(self.stop_ids), None)))
        return ChatTemplate(self._template, bos_token=bos, eos_token=eos)

    def _spelling(self, token_id: int) -> str:
        return self._pieces[token_id].decode("utf-8", errors="replace")


class Spellings:
    """Finds control tokens in text. One of a single character cannot be broken apart, so it is not looked for."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: i for text, i in ids.items() if len(text) > 1}
        self._lengths = sorted({len(text) for text in self._ids}, reverse=True)
        self._longest = self._lengths[0] if self._lengths else 0
        self._beginnings = {text[:n] for text in self._ids for n in range(1, len(text))}
        self._endings = {text[n:] for text in self._ids for n in range(1, len(text))}
        # Vocabularies have thousands of control tokens: look where one may start, then ask the table, longest first.
        starts = "".join(sorted({re.escape(text[:1]) for text in self._ids}))
        self._start = re.compile(f"[{starts}]") if starts else None

    def broken(self, text: str, mark: str) -> str:
        """`text` with `mark` inside every spelling, overlapping ones included, and inside what could become one at its edges.

        Templates put text of their own before and after a message, and may trim it.
        """
        cuts = {start + 1 for start in self._starts(text) if self._match(text, start)}
        for end in {len(text), len(text.rstrip())}:
            cuts.update(start + 1 for start in range(max(0, end - self._longest), end) if text[start:end] in self._beginnings)
        for start in {0, len(text) - len(text.lstrip())}:
            if any(text[start:end] in self._endings for end in range(start + 1, min(len(text), start + self._longest) + 1)):
                cuts.add(start)
        edges = [0, *sorted(cuts), len(text)]
        return mark.join(text[left:right] for left, right in pairwise(edges))

    def split(self, text: str) -> Iterator[str | int]:
        """Runs of plain text and control ids, in order; the longest spelling wins."""
        done = 0
        for start in self._starts(text):
            if start >= done and (spelling := self._match(text, start)):
                yield text[done:start]
                yield self._ids[spelling]
                done = start + len(spelling)
        yield text[done:]

    def _starts(self, text: str) -> Iterator[int]:
        return (match.start() for match in self._start.finditer(text)) if self._start else iter(())

    def _match(self, text: str, start: int) -> str | None:
        return next((s for n in self._lengths if (s := text[start : start + n]) in self._ids), None)


def _read(folder: Path, name: str) -> bytes:
    check_relative(name)
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise ArtifactError(f"{folder / name} cannot be read ({error.strerror}); convert or pull the model again") from error


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text holds a lone surrogate at character {error.start}, which is not Unicode; remove it") from None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("a chat needs at least one message")
    for n, message in enumerate(messages):
        fields: Mapping[str, object] = message
        for key in ("role", "content"):
            value = fields.get(key)
            if not isinstance(value, str):
                raise ValueError(f"message {n} needs a text as {key!r}, found {type(value).__name__}")
            _check_unicode(value)


def _unused_character(texts: Sequence[str], template: str) -> str:
    """A noncharacter that no text contains, or else one for private use."""
    used = {*template, *chain.from_iterable(texts)}
    candidates = chain(range(0xFDD0, 0xFDF0), range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
    mark = next((chr(c) for c in candidates if chr(c) not in used), None)
    if mark is None:
        raise ValueError("the messages use up every private-use character of Unicode; shorten them")
    return mark
