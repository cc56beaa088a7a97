"""A runtime for tests of the command line: the real sessions and loop over a toy engine that answers by rule.

The vocabulary is the 256 bytes and a few markers. The answer to "TEXT" is "You said: TEXT. You said: TEXT." and the end, whatever
was asked before; a system message "S" makes it "S: TEXT.". With FAKE_STEP_S in the environment every forward pass takes so many
seconds, with FAKE_LOAD_S loading does; "working" or "loading" on stderr then says that it has begun.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgespec.core.errors import ArtifactError
from edgespec.orchestrator.runtime import Runtime
from edgespec.orchestrator.text import Message, TemplateError
from tests.helpers.toys import ToyEngine

USER, SYSTEM, ASSISTANT, END = 256, 257, 258, 259
VOCAB = 260
loads: list[dict[str, object]] = []  # the options of every load since a test cleared it
signs: set[str] = set()


class ByteTokenizer:
    vocab_size = VOCAB
    control_ids = frozenset({USER, SYSTEM, ASSISTANT, END})
    stop_ids = (END,)
    add_bos = False
    bos_id = None
    has_template = True
    leading_space = False

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        ids: list[int] = []
        for message in messages:
            if message["content"] == "raise":
                raise TemplateError("the template refuses this")
            marker = {"user": USER, "system": SYSTEM, "assistant": ASSISTANT}[message["role"]]
            ids += [marker, *message["content"].encode()]
        return [*ids, ASSISTANT] if add_generation_prompt else ids

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else b""

    visible_bytes = token_bytes

    def digest(self) -> str:
        return "toy"


def asked(tokens: list[int]) -> int | None:
    """Where the answer begins: behind the first assistant marker after the last user marker. (Drafts may hold markers, too.)"""
    if USER not in tokens:
        return None
    user = len(tokens) - 1 - tokens[::-1].index(USER)
    return tokens.index(ASSISTANT, user) + 1 if ASSISTANT in tokens[user:] else None


def reply(tokens: list[int], begin: int) -> list[int]:
    """The whole answer that begins at `begin`."""
    user = len(tokens) - 1 - tokens[::-1].index(USER)
    said = bytes(t for t in tokens[user + 1 : begin - 1] if t < 256)
    if tokens[0] == SYSTEM:
        return [*tokens[1 : tokens.index(USER)], *b": ", *said, *b".", END]
    return [*b"You said: ", *said, *b". You said: ", *said, *b".", END]


def take_time(variable: str, sign: str) -> None:
    if variable not in os.environ:
        return
    if sign not in signs:
        signs.add(sign)
        print(sign, file=sys.stderr, flush=True)
    time.sleep(float(os.environ[variable]))


def law(tokens: list[int]) -> np.ndarray:
    take_time("FAKE_STEP_S", "working")
    begin = asked(tokens)
    answer = [*b"raw"] * 200 if begin is None else reply(tokens, begin)
    said = len(tokens) - (begin or 0)
    logits = np.zeros(VOCAB, np.float32)
    logits[answer[said] if said < len(answer) else END] = 10.0
    return logits


def load(model: str | Path, **options: object) -> Runtime:
    """Stands in for `edgespec.load`."""
    loads.append({"model": model, **options})
    take_time("FAKE_LOAD_S", "loading")
    if model == "absent" or options.get("draft") == "absent":
        raise ArtifactError("no model 'absent' in the store (installed: none); run `edgespec pull absent`")
    draft = str(options["draft"])
    engine = ToyEngine(law, vocab_size=VOCAB, max_context=600, name=str(model))
    return Runtime(engine, ByteTokenizer(), draft="ngram" if draft == "auto" else draft, engine_name="toy")  # type: ignore[arg-type]


def install() -> None:
    """Replace `edgespec.load` for the rest of the process."""
    import edgespec

    vars(edgespec)["load"] = load
