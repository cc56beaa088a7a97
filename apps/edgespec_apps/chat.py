"""`edgespec chat`: a conversation at the terminal, or line by line from standard input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from edgespec_apps.console import complain, ctrl_c, each_in_background, prefill_meter, say, write
from edgespec_apps.generate import decoded
from edgespec_apps.options import EngineName, MaxTokens, ModelOptions, SamplingOptions
from edgespec_apps.turns import Painter, count, ending, status

if TYPE_CHECKING:
    from edgespec.core.chunk import Stats
    from edgespec.core.sampling import Sampling
    from edgespec.orchestrator.runtime import Runtime
    from edgespec.orchestrator.session import Session
    from edgespec.orchestrator.text import Message

SCHEMA = "edgespec.chat/1"
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL | re.IGNORECASE)  # a path such as /etc/hosts is a prompt

HELP = """\
/help                 this list
/stats                tokens per second and guesses kept, over the whole chat
/reset                forget the conversation (the system message stays)
/system [TEXT]        show or set the system message
/draft [none|ngram|auto|MODEL]   show or change what guesses ahead
/drafted [on|off]     colour guessed text, or stop colouring it
/save FILE            write the conversation as JSON
/quit, /exit          leave (also Ctrl-D)
Ctrl-C stops an answer. Alt-Enter, or a backslash at the end of a line, starts a new line."""


def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of the conversation.")] = None,
    show_drafted: Annotated[
        bool, typer.Option("--show-drafted", help="Colour the text that was guessed and kept (terminal only).")
    ] = False,
    max_tokens: MaxTokens = 1024,
) -> None:
    """Talk with a model. Without a terminal, each line of standard input is one turn."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with Conversation(
        model=model,
        sampling=sampling.sampling(),
        stop=sampling.stops(),
        max_tokens=max_tokens,
        system=system,
        show_drafted=show_drafted,
        terminal=terminal,
    ) as conversation:
        say(conversation.banner())
        if show_drafted and not terminal:
            say("--show-drafted colours text on a terminal only")
        for line in typed_lines() if terminal else piped_lines(conversation.complain):
            if not conversation.take(line):
                break
        if conversation.failed and not terminal:
            raise typer.Exit(1)


@dataclass(kw_only=True)
class Conversation:
    """The messages so far, and the session that answers them. Leaving the block frees the model."""

    model: ModelOptions
    sampling: Sampling
    stop: tuple[str, ...] = ()
    max_tokens: int = 1024
    system: str | None = None
    show_drafted: bool = False
    terminal: bool = False
    turns: list[Message] = field(default_factory=list)
    answers: list[Stats] = field(default_factory=list)
    failed: bool = False  # one line or more ended in an error
    _saved: set[Path] = field(default_factory=set)
    _open: ExitStack = field(default_factory=ExitStack)
    _runtime: Runtime = field(init=False)
    _session: Session = field(init=False)

    def __enter__(self) -> Conversation:
        self._load(self.model)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _load(self, model: ModelOptions) -> None:
        with ExitStack() as opened:
            self._runtime = opened.enter_context(model.load())
            self._session = opened.enter_context(model.session(self._runtime))
            self._open, self.model = opened.pop_all(), model

    def banner(self) -> str:
        hint = " /help lists commands." if self.terminal else ""
        return f"{self._runtime.spec.name} on {self._runtime.engine_name}, draft {self._runtime.draft_name}.{hint}"

    def take(self, line: str) -> bool:
        """One line from the user: a command or a turn. False: the user wants to leave. Errors become one line on stderr."""
        from edgespec.core.errors import EdgespecError

        command = _COMMAND.fullmatch(line.strip())
        try:
            if command:
                return self._obey(command[1].lower(), (command[2] or "").strip())
            if line.strip():
                self._answer(line)
        except (EdgespecError, ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            self.complain(_with_advice(error))
        return True

    def complain(self, text: str) -> None:
        self.failed = True
        complain(text)

    def _messages(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def _answer(self, text: str) -> None:
        from edgespec.core.cancel import CancelToken
        from edgespec.orchestrator.session import Tally

        question: Message = {"role": "user", "content": text}
        cancel, tally = CancelToken(), Tally()
        painter = Painter(self._pieces()) if self.show_drafted and self.terminal else None
        with ctrl_c(cancel.cancel) if self.terminal else _as_it_is():
            for chunk in each_in_background(
                lambda: self._session.stream(
                    [*self._messages(), question],
                    max_tokens=self.max_tokens,
                    sampling=self.sampling,
                    stop=self.stop,
                    cancel=cancel,
                    progress=prefill_meter(),
                ),
                cancel=cancel.cancel,
            ):
                tally.add(chunk)
                if painter:
                    sys.stdout.write(painter.paint(chunk))
                    sys.stdout.flush()
                else:
                    write(chunk.text)
        write("\n")
        answer = tally.answer(prompt_tokens=self._session.prompt_tokens)
        self.answers.append(answer.stats)
        say(f"[{', '.join(filter(None, [status([answer.stats]), ending(answer, self.max_tokens)]))}]")
        if answer.text:
            reply: Message = {"role": "assistant", "content": answer.text}
            self.turns += [question, reply]

    def _pieces(self) -> Callable[[int], str]:
        from edgespec.orchestrator.text import Detokenizer

        return Detokenizer(self._runtime.tokenizer).push

    def _obey(self, name: str, argument: str) -> bool:
        match name:
            case "help":
                say(HELP)
            case "stats":
                say(f"{count(len(self.answers), 'answer')}, {status(self.answers)}" if self.answers else "no answers yet")
            case "reset":
                self.turns.clear()
                say("conversation forgotten")
            case "system":
                self.system = argument or self.system
                say(f"system message: {self.system}" if self.system else "no system message; /system TEXT sets one")
            case "draft":
                self._change_draft(argument)
            case "drafted":
                self.show_drafted = _switched(self.show_drafted, argument)
                say(f"guessed text is {'coloured' if self.show_drafted else 'not coloured'}")
            case "save":
                self._save(argument)
            case "quit" | "exit":
                return False
            case _:
                raise ValueError(f"unknown command /{name}; /help lists them")
        return True

    def _change_draft(self, draft: str) -> None:
        if draft:
            before = self.model
            self._open.close()  # first: two loaded copies may not fit in memory
            try:
                self._load(replace(before, draft=draft, draft_engine=EngineName.auto))  # what ran one draft may not run another
            except Exception:
                self._load(before)
                raise
        say(f"draft: {self._runtime.draft_name}")

    def _save(self, name: str) -> None:
        if not name:
            raise ValueError("/save needs a file name")
        file = Path(name).expanduser().absolute()
        document = {"schema": SCHEMA, "model": self._runtime.spec.name, "messages": self._messages()}
        with file.open("w" if file in self._saved else "x", encoding="utf-8") as out:  # other files are never overwritten
            out.write(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
        self._saved.add(file)
        say(f"saved {len(self.turns)} messages to {file}")


def _switched(now: bool, argument: str) -> bool:
    if argument.lower() not in ("", "on", "off"):
        raise ValueError(f"/drafted takes on, off or nothing, got {argument!r}")
    return argument.lower() == "on" if argument else not now


def _with_advice(error: Exception) -> str:
    from edgespec.core.errors import ContextLengthError

    if isinstance(error, ContextLengthError):
        return f"{error}; /reset starts the conversation afresh"
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)


@contextmanager
def _as_it_is() -> Generator[None]:
    yield


def piped_lines(on_bad: Callable[[str], None]) -> Iterator[str]:
    """Lines of standard input; `on_bad` is told of one that is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield decoded(line.rstrip(b"\r\n"), f"line {number} of standard input")
        except ValueError as error:
            on_bad(str(error))


class _Prompt(Protocol):
    def prompt(self) -> str: ...


def typed_lines() -> Iterator[str]:
    """What the user types, until Ctrl-D. Ctrl-C clears the line."""
    prompt = _terminal_prompt()
    while True:
        try:
            yield prompt.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _terminal_prompt() -> _Prompt:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from edgespec.orchestrator.store import home

    history = home() / "chat_history"
    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch(mode=0o600)
    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def alt_enter(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession[str]("> ", history=FileHistory(str(history)), key_bindings=keys, multiline=True, prompt_continuation="  ")
