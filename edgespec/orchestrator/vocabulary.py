"""The two tokenizer libraries behind one small door: text → ids, and the exact bytes of every id.

Decoding is ours, not the libraries': an id's bytes never depend on its neighbours, so a stream and a whole answer are the
same text. Only the first space, which sentencepiece puts in front of every text, needs a rule (`leading_space`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from edgespec.core.errors import ArtifactError

SPACE_MARK = "▁"  # U+2581, sentencepiece's space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_IDS = 1 << 22
_PLAIN_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


class Vocabulary(Protocol):
    @property
    def pieces(self) -> list[bytes]:
        """The bytes of every id; control tokens give their own spelling, ids that no token has give b""."""
        ...

    @property
    def control_ids(self) -> frozenset[int]: ...

    @property
    def leading_space(self) -> bool:
        """Whether encoding puts a space before the text, which decoding takes away again."""
        ...

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Control tokens spelled in `text` stay text. `first`: nothing stands before this text."""
        ...


def open_vocabulary(kind: str, content: bytes) -> Vocabulary:
    """Raises ArtifactError for a damaged file or a kind that is not "tokenizers" or "sentencepiece"."""
    if kind == "tokenizers":
        return TokenizersVocabulary(content)
    if kind == "sentencepiece":
        return SentencePieceVocabulary(content)
    raise ArtifactError(f"tokenizer kind {kind!r} is not known; expected 'tokenizers' or 'sentencepiece'; convert the model again")


class TokenizersVocabulary:
    """A Hugging Face `tokenizers` JSON, byte-level or shaped like sentencepiece."""

    def __init__(self, content: bytes) -> None:
        library = _tokenizers(content)
        self._first = self._later = library
        before = [*_steps(library.normalizer), *_steps(library.pre_tokenizer)]
        decoder = _steps(library.decoder)
        metaspace = next((s for s in before if s["type"] == "Metaspace" and s.get("prepend_scheme") == "first"), None)
        if metaspace is not None:
            from tokenizers.pre_tokenizers import Metaspace

            self._later = _tokenizers(content)
            self._later.pre_tokenizer = Metaspace(metaspace["replacement"], prepend_scheme="never", split=metaspace.get("split", True))
        added = library.get_added_tokens_decoder()
        self.control_ids = frozenset(i for i, token in added.items() if token.special)
        # The text side decides: some files pair a byte-level pre-tokenizer with a sentencepiece-shaped decoder.
        byte_level = any(step["type"] == "ByteLevel" for step in (*before, *decoder))
        self.leading_space = not byte_level and any(map(_drops_first_space, decoder))
        to_bytes = _undo_byte_level() if byte_level else _piece_decoder(decoder)
        vocab = library.get_vocab(with_added_tokens=True)
        size = max(vocab.values(), default=-1) + 1
        if size > _MAX_IDS:
            raise ArtifactError(f"the tokenizer has an id {size - 1}, no model has that many tokens; convert or pull the model again")
        self.pieces = [b""] * size
        for text, i in vocab.items():
            self.pieces[i] = text.encode() if i in added else to_bytes(text)

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        with _library_errors("the tokenizer cannot encode this text"):
            return (self._first if first else self._later).encode(text, add_special_tokens=False).ids


class SentencePieceVocabulary:
    """A sentencepiece model file. Unknown and unused pieces count as control: neither is ever part of an answer."""

    def __init__(self, content: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        library: Any = SentencePieceProcessor()
        try:
            library.LoadFromSerializedProto(content)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ArtifactError(f"not a sentencepiece model ({_one_line(error)}); convert or pull the model again") from error
        ids = list(range(library.get_piece_size()))
        pieces: list[str] = library.id_to_piece(ids)
        flags = zip(library.is_control(ids), library.is_unknown(ids), library.is_unused(ids), library.is_byte(ids), strict=True)
        self._library = library
        self.pieces: list[bytes] = []
        control: list[int] = []
        for i, (piece, (is_control, unknown, unused, is_byte)) in enumerate(zip(pieces, flags, strict=True)):
            if is_control or unknown or unused:
                control.append(i)
                self.pieces.append(piece.encode())
            else:
                self.pieces.append(bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(SPACE_MARK, " ").encode())
        self.control_ids = frozenset(control)
        self.leading_space = _drops_leading_space(library, pieces)

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        del first  # sentencepiece models are trained with the space before every run of text
        return self._library.encode(text)


def _tokenizers(content: bytes) -> Any:
    from tokenizers import Tokenizer

    with _library_errors("not a usable tokenizers JSON"):
        library = Tokenizer.from_buffer(content)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # special tokens spelled in text are text
    return library


@contextmanager
def _library_errors(what: str) -> Generator[None]:
    """`tokenizers` raises bare Exception, or panics past it, for every kind of damaged file."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ArtifactError(f"{what} ({_one_line(error)}); convert or pull the model again") from error


def _steps(component: Any) -> list[dict[str, Any]]:
    """A normaliser, pre-tokenizer or decoder as a flat list of its steps."""
    return [] if component is None else list(_flatten(json.loads(component.__getstate__())))


def _flatten(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    children: Iterable[dict[str, Any]] | None = next((step[k] for k in ("pretokenizers", "normalizers", "decoders") if k in step), None)
    if children is None:
        yield step
    else:
        for child in children:
            yield from _flatten(child)


def _undo_byte_level() -> Callable[[str], bytes]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the other 68 as U+0100 upwards (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    table: dict[str, bytes] = {chr(b): bytes([b]) for b in printable} | {chr(256 + n): bytes([b]) for n, b in enumerate(others)}

    def to_bytes(text: str) -> bytes:
        try:
            return b"".join([table[c] for c in text])
        except KeyError:
            return b"".join(table.get(c) or c.encode() for c in text)

    return to_bytes


def _piece_decoder(decoder: list[dict[str, Any]]) -> Callable[[str], bytes]:
    unknown = sorted({step["type"] for step in decoder} - _PLAIN_DECODERS)
    if unknown:
        raise ArtifactError(f"tokenizer decoder {unknown[0]!r} is not supported; supported are ByteLevel and sentencepiece-shaped ones")
    replaced: dict[str, str] = {}
    for step in decoder:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replaced[step["pattern"]["String"]] = step["content"]
        elif step["type"] == "Metaspace":
            replaced[step["replacement"]] = " "
    byte_fallback = any(step["type"] == "ByteFallback" for step in decoder)

    def to_bytes(text: str) -> bytes:
        if byte_fallback and (match := _BYTE_PIECE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        for old, new in replaced.items():
            text = text.replace(old, new)
        return text.encode()

    return to_bytes


def _drops_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step["type"] == "Strip" and step["content"] == " " and step["start"] > 0


def _drops_leading_space(library: Any, pieces: list[str]) -> bool:
    """The model's own decoder knows: `▁x▁x` comes out with or without its first space."""
    probe = next((i for i, p in enumerate(pieces) if p.startswith(SPACE_MARK) and p.strip(SPACE_MARK)), None)
    return probe is not None and not str(library.decode([probe, probe])).startswith(" ")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
