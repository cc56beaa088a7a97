"""Chat templates: messages become the one text that a model was trained on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import jinja2

MAX_TEMPLATE_CHARS = 200_000  # the longest seen in the field is a tenth of this
_PROBE = "Answer in rhymes."


class Message(TypedDict):
    role: str
    content: str


class TemplateError(ValueError):
    """A template is broken, refuses these messages (the text is then its own), or does too much work."""


class ChatTemplate:
    """A Jinja chat template from a model package, which nobody has vetted: it runs in `Sandbox`, counted step by step.

    Jinja is imported and the template compiled on the first render.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}; it is broken or hostile")
        self._source = source
        # Templates are written for a library that always names tools and documents.
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        self._lock = threading.Lock()
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a chat.

        A template that refuses or drops a system message gets it as the beginning of the first user turn.
        Raises TemplateError with the template's own message when it refuses these messages all the same.
        """
        merged = merge_system(messages)
        if merged is not None and not self._takes_system:
            messages = merged
        return self._render(messages, add_generation_prompt)

    @cached_property
    def _takes_system(self) -> bool:
        """Some templates refuse a system message, others drop it in silence."""
        try:
            text = self._render([{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hi."}], True)
        except TemplateError:
            return False
        return _PROBE in text

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError as JinjaError

        from edgespec.orchestrator.sandbox import Sandbox

        copies = [dict(message) for message in messages]
        with self._lock:
            try:
                template = self._compiled = self._compiled or Sandbox().compiled(self._source)
                sandbox = template.environment
                assert isinstance(sandbox, Sandbox)
                sandbox.start(messages=len(messages), input_chars=sum(len(m["content"]) + len(m["role"]) for m in messages))
                return template.render(messages=copies, add_generation_prompt=add_generation_prompt, **self._variables)
            except JinjaError as error:
                raise TemplateError(_one_line(error) or "the chat template refuses these messages") from error
            except Exception as error:  # whatever a stranger's program may run into
                raise TemplateError(f"the chat template fails: {type(error).__name__}: {_one_line(error)}") from error


def merge_system(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with a leading system text moved into the first user turn; None if there is none to move."""
    if not messages or messages[0]["role"] != "system":
        return None
    system, rest = messages[0]["content"], list(messages[1:])
    if rest and rest[0]["role"] == "user":
        return [{"role": "user", "content": f"{system}\n\n{rest[0]['content']}".strip()}, *rest[1:]]
    return [{"role": "user", "content": system}, *rest]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
