"""`edgespec generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps.console import INTERRUPTED, ctrl_c, each_in_background, prefill_meter, say, write
from edgespec_apps.options import AsJson, MaxTokens, ModelOptions, SamplingOptions
from edgespec_apps.turns import ending

if TYPE_CHECKING:
    from edgespec.core.chunk import Answer
    from edgespec.core.trace import RoundTrace
    from edgespec.orchestrator.runtime import Runtime
    from edgespec.orchestrator.text import Message

SCHEMA = "edgespec.generate/1"


def generate(
    model: ModelOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to answer; `-` or nothing reads it from standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a UTF-8 file.")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    max_tokens: MaxTokens = 512,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", min=0, max=20, metavar="N", help="With --json: log-probabilities, with N alternatives per token."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write one JSON line per round: what was guessed and kept, and the times."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming the text to standard output."""
    from edgespec.core.cancel import CancelToken
    from edgespec.orchestrator.session import Tally

    if logprobs is not None and not as_json:
        raise ValueError("--logprobs shows in the JSON line only; add --json")
    cancel = CancelToken()
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "sampling": sampling.sampling(logprobs=logprobs),
        "stop": sampling.stops(),
        "raw": raw,
        "cancel": cancel,
        "progress": prefill_meter(),
    }
    question = as_messages(read_prompt(prompt, file, raw=raw), system, raw=raw)
    with ExitStack() as stack:
        record = stack.enter_context(trace.open("w", encoding="utf-8")) if trace else None
        runtime = stack.enter_context(model.load())
        session = stack.enter_context(model.session(runtime))
        stack.enter_context(ctrl_c(cancel.cancel))
        tally = Tally()
        for chunk in each_in_background(lambda: session.stream(question, **options), cancel=cancel.cancel):
            tally.add(chunk)
            if not as_json:
                write(chunk.text)
        answer = tally.answer(prompt_tokens=session.prompt_tokens)
        print(json.dumps(report(model, runtime, answer)) if as_json else "", flush=True)
        if record:
            record.writelines(json.dumps(line) + "\n" for line in as_dicts(answer.traces))
    if answer.finish == "length" and sys.stderr.isatty():
        say(f"[{ending(answer, max_tokens)}]")
    if answer.finish == "cancelled":
        raise typer.Exit(INTERRUPTED)


def report(model: ModelOptions, runtime: Runtime, answer: Answer) -> dict[str, Any]:
    """The JSON line. Scripts rely on its keys."""
    return {
        "schema": SCHEMA,
        "model": runtime.spec.name,
        "draft": runtime.draft_name,
        "engine": runtime.engine_name,
        "policy": model.policy,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens,
        "stats": answer.stats.to_json(),
        "logprobs": [asdict(token) for token in answer.logprobs] if answer.logprobs else None,
        "trace": as_dicts(answer.traces),
    }


def as_dicts(traces: Iterable[RoundTrace]) -> list[dict[str, Any]]:
    return [asdict(trace) | {"overhead_ms": trace.overhead_ms} for trace in traces]


def as_messages(prompt: str, system: str | None, *, raw: bool) -> str | Sequence[Message]:
    if system is None:
        return prompt
    if raw:
        raise ValueError("--system needs the chat template that --raw leaves out; drop one of them")
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def read_prompt(argument: str | None, file: Path | None, *, raw: bool) -> str:
    """The prompt from the command line, a file or standard input. Raises ValueError if it is missing, doubled, empty or not UTF-8.

    A file's last newlines are the editor's, not the writer's: only `raw` keeps them.
    """
    if argument is not None and file:
        raise ValueError("give the prompt or --file, not both")
    if file:
        where, text = str(file), decoded(_content(file), str(file))
    elif argument in (None, "-"):
        where, text = "standard input", decoded(_standard_input(), "standard input")
    else:
        where, text = "the command line", argument or ""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the prompt on the command line is not UTF-8 text") from None
    if not raw and argument in (None, "-"):
        text = text.rstrip("\r\n")
    if not (text if raw else text.strip()):
        raise ValueError(f"the prompt from {where} is empty")
    return text


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {file}: {error.strerror}") from error


def _standard_input() -> bytes:
    if sys.stdin.isatty():
        say("Reading the prompt from the terminal; end it with Ctrl-D.")
    return sys.stdin.buffer.read()


def decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text (byte {error.start}); convert it first") from None
