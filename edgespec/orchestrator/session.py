"""One conversation with one model: a cache, a drafter, and the way from a prompt to a stream of text."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from time import perf_counter, sleep
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TypedDict

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.chunk import Answer, Chunk, Finish, Stats, TokenLogProb
from edgespec.core.draft import common_prefix
from edgespec.core.engine import Cache
from edgespec.core.errors import Cancelled, CapabilityError, ContextLengthError
from edgespec.core.plan import Knobs
from edgespec.core.policy import Policy
from edgespec.core.sampling import Sampling, SamplingState
from edgespec.core.trace import RoundTrace
from edgespec.core.verifier import Verifier
from edgespec.orchestrator.loop import Parts, Progress, Round, decode, prefill
from edgespec.orchestrator.text import Detokenizer, Message, StopStrings, Tokenizer
from edgespec.scheduling.parse import DEFAULT as DEFAULT_POLICY
from edgespec.scheduling.parse import GOVERNED, governed, parse_policy
from edgespec.verification.greedy import GreedyVerifier
from edgespec.verification.match import MatchVerifier
from edgespec.verification.rejection import RejectionVerifier

if TYPE_CHECKING:
    from edgespec.orchestrator.runtime import Runtime

Prompt = str | Sequence[Message] | Sequence[int]

_LONGEST_HISTORY = 8192  # rounds a policy plans from; beyond it the older three quarters are dropped between answers

_VERIFIERS: Mapping[str, Callable[[], Verifier]] = {
    "greedy": GreedyVerifier,
    "match": MatchVerifier,
    "rejection": RejectionVerifier,
}


_CLOSE_POLL_S = 0.01


@dataclass(slots=True, eq=False)
class _Turn:
    """One answer's claim on its session. `chunks` refers to the generator that streams it, weakly: dropping that ends the answer."""

    chunks: weakref.ref[Generator[Chunk]] | None = None


class Learnt(NamedTuple):
    """A policy and the rounds it has seen."""

    policy: Policy
    history: list[RoundTrace]


class _Settings(TypedDict):
    policy: str
    verify: str
    max_context: int | None
    knobs: Knobs | None
    draft: str | None


class Session:
    """Answers one prompt at a time and keeps what it has read, so that the next prompt pays only for what is new.

    Thread-safe in this sense: `cancel` may come from any thread; a second `stream` while one is running is refused.
    Several sessions over one `Runtime` may run in several threads.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        policy: str = DEFAULT_POLICY,
        verify: str = "auto",
        max_context: int | None = None,
        knobs: Knobs | None = None,
        draft: str | None = None,
        owns_runtime: bool = False,
    ) -> None:
        limit = runtime.spec.max_context
        if max_context is not None and not 1 < max_context <= limit:
            raise ValueError(f"max_context must lie in 2..{limit} for {runtime.spec.name}, got {max_context}")
        parse_policy(policy)  # a bad name is an error before anything is made
        if verify not in ("auto", *_VERIFIERS):
            raise ValueError(f"verify must be auto, {', '.join(_VERIFIERS)}; got {verify!r}")
        self._runtime, self._owns_runtime = runtime, owns_runtime
        self._settings = _Settings(policy=policy, verify=verify, max_context=max_context, knobs=knobs, draft=draft)
        self._verify = verify
        self._max_context = max_context or limit
        self._knobs = knobs or Knobs()
        _check_knobs(self._knobs, policy)
        self._drafters = runtime.new_drafters(self._max_context, draft)
        self._cache: Cache | None = None
        self._known: list[int] = []  # the last prompt and its answer; the cache holds the first of them
        self._policy, self._history = runtime.recall(policy)  # with what was seen of this model before
        self._turn: _Turn | None = None  # who may use the cache and the drafter
        self._turns = threading.Lock()  # guards `_turn`
        self._cancel = CancelToken()
        self.prompt_tokens = 0  # of the last prompt

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self._max_context

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 512,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        raw: bool = False,
        cancel: CancelToken | None = None,
        progress: Progress | None = None,
    ) -> Generator[Chunk]:
        """Yield a Chunk per round. `prompt` is a user message, a list of messages, or token ids; `raw` text skips the chat template.

        Raises ValueError for bad arguments and ContextLengthError for a prompt that leaves no room, before any compute;
        CapabilityError while another answer of this session is still streaming.
        """
        sampling = sampling or Sampling()
        if not isinstance(max_tokens, int) or max_tokens < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise ValueError(f"max_tokens must be a whole number >= 1, got {max_tokens}")
        if isinstance(stop, str):
            raise ValueError(f"stop must be a list of strings, got the string {stop!r}")
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        _check_bias(sampling, self._runtime.spec.vocab_size)
        verify = self._verifier(sampling)
        token_ids = self._encode(prompt, raw=raw)
        room = self._max_context - len(token_ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens and the context holds {self._max_context}; {self._more_context()}"
            )
        turn = _Turn()
        chunks = self._answer(turn, token_ids, verify, sampling, min(max_tokens, room), stop, cancel or CancelToken(), progress)
        turn.chunks = weakref.ref(chunks)
        return chunks

    def _more_context(self) -> str:
        limit = self._runtime.spec.max_context
        if self._max_context == limit:
            return "shorten it, as this model allows no more"
        return f"shorten it or raise max_context (--max-context; this model allows {limit})"

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 512,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        raw: bool = False,
        cancel: CancelToken | None = None,
        progress: Progress | None = None,
    ) -> Answer:
        """The whole answer at once; arguments and errors as for `stream`."""
        tally = Tally()
        chunks = self.stream(prompt, max_tokens=max_tokens, sampling=sampling, stop=stop, raw=raw, cancel=cancel, progress=progress)
        with closing(chunks):
            for chunk in chunks:
                tally.add(chunk)
        return tally.answer(prompt_tokens=self.prompt_tokens)

    def cancel(self) -> None:
        """End the running answer, from any thread; its last chunk says "cancelled". Does nothing when none is running."""
        self._cancel.cancel()

    def another(self) -> Session:
        """A second conversation over the same loaded model, with the same settings."""
        return Session(self._runtime, **self._settings)

    def close(self) -> None:
        """Release the cache, the drafter, and the model if this session opened it. Idempotent.

        An answer that is still streaming ends: at once if nobody is computing it, else after the pass that runs.
        """
        turn = _Turn()
        try:
            while not self._take(turn):
                self.cancel()
                self._end_suspended()
                sleep(_CLOSE_POLL_S)
            self._drafters.close()
            self._cache, self._known = None, []
            if self._history:
                name = self._settings["policy"]
                self._runtime.leave(name, Learnt(self._policy, self._history))
                self._policy, self._history = governed(parse_policy(name)), []
            if self._owns_runtime:
                self._runtime.close()
        finally:
            if self._turn is turn:
                self._turn = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _verifier(self, sampling: Sampling) -> Verifier:
        if self._verify == "greedy" and not sampling.greedy:
            raise ValueError(f"verify 'greedy' ignores temperature {sampling.temperature:g}; use auto, match or rejection")
        verifier = _VERIFIERS[self._verify if self._verify != "auto" else _fitting(sampling)]()
        if self._knobs.lossless and not verifier.lossless:
            raise CapabilityError(f"verify {verifier.name!r} is not lossless, and the knobs ask for lossless; choose another")
        return verifier

    def _encode(self, prompt: Prompt, *, raw: bool) -> list[int]:
        tokenizer = self._runtime.tokenizer
        if isinstance(prompt, str):
            chat = not raw and tokenizer.has_template
            ids = tokenizer.encode_chat([Message(role="user", content=prompt)]) if chat else tokenizer.encode(prompt, bos=tokenizer.add_bos)
        elif messages := [m for m in prompt if isinstance(m, Mapping)]:
            if raw:
                raise ValueError("messages need the chat template that raw leaves out; give text or token ids")
            if len(messages) != len(prompt):
                raise ValueError("a prompt is all messages or all token ids, not a mixture")
            ids = tokenizer.encode_chat(messages)
        else:
            ids = [int(t) for t in prompt if not isinstance(t, Mapping)]
        if not ids:
            raise ValueError("the prompt is empty")
        if min(ids) < 0 or max(ids) >= self._runtime.spec.vocab_size:
            raise ValueError(f"prompt token ids must lie in 0..{self._runtime.spec.vocab_size - 1}, got {min(ids)}..{max(ids)}")
        return ids

    def _take(self, turn: _Turn) -> bool:
        """Whether the session is this turn's from now on."""
        with self._turns:
            if self._turn is None:
                self._turn = turn
            return self._turn is turn

    def _end_suspended(self) -> None:
        """End an answer that waits for its reader to ask on; one that is being computed will see that it is cancelled."""
        turn = self._turn
        if turn is not None and turn.chunks is not None and (chunks := turn.chunks()) is not None:
            with suppress(ValueError):  # it is running
                chunks.close()

    def _answer(
        self,
        turn: _Turn,
        prompt: list[int],
        verify: Verifier,
        sampling: Sampling,
        max_tokens: int,
        stop: Sequence[str],
        cancel: CancelToken,
        progress: Progress | None,
    ) -> Generator[Chunk]:
        try:
            if not self._take(turn):
                raise CapabilityError("this session is still answering; open another one over the same model with `session.another()`")
            self._cancel, self.prompt_tokens = cancel, len(prompt)
            cache = self._rewound_cache(prompt)
            text = _TextOut(self._runtime.tokenizer, stop)
            stop_ids = frozenset(self._runtime.tokenizer.stop_ids)
            parts = self._parts(cache, verify, sampling, prompt)
            try:
                prefill(parts, prompt, progress)
                for round in decode(parts, prompt[-1], max_tokens=max_tokens, stop_ids=stop_ids, history=self._history):
                    self._known += round.token_ids
                    chunk = text.push(round, stop_ids)
                    yield chunk
                    if chunk.finish is not None:
                        return
            except Cancelled:
                yield Chunk(text=text.flush(), finish="cancelled")
        finally:  # an interrupt may come before the taking, or right after it
            if self._turn is turn:
                self._turn = None
            self._runtime.remember(self._settings["policy"], self._history)
            if len(self._history) > _LONGEST_HISTORY:
                del self._history[: -_LONGEST_HISTORY // 4]

    def _rewound_cache(self, prompt: Sequence[int]) -> Cache:
        """The session's cache, holding exactly the tokens that this prompt shares with the last one.

        Whatever ended the last answer, what the cache holds is the beginning of what was known then.
        """
        if self._cache is None:
            self._cache = self._runtime.target.new_cache(self._max_context)
        read = self._known[: self._cache.length]
        self._cache.truncate(min(common_prefix(read, prompt), len(prompt) - 1))
        self._known = list(prompt)
        return self._cache

    def _parts(self, cache: Cache, verify: Verifier, sampling: Sampling, prompt: Sequence[int]) -> Parts:
        self._drafters.start(prompt, sampling=sampling, cancel=self._cancel)
        seeds = np.random.SeedSequence(sampling.seed).spawn(2)
        return Parts(
            target=self._runtime.target,
            cache=cache,
            drafters=self._drafters,
            verify=verify,
            policy=self._policy,
            state=SamplingState.after(sampling, prompt),
            target_rng=np.random.default_rng(seeds[0]),
            draft_rng=np.random.default_rng(seeds[1]),
            knobs=self._knobs,
            profile=self._runtime.profile,
            power=self._runtime.power,
            meter_mj=self._runtime.meter_mj,
            cancel=self._cancel,
        )


def _fitting(sampling: Sampling) -> str:
    """A seed asks for the same text again, whatever is drafted, by plan or in heat; rejection keeps more but promises the law only."""
    return "greedy" if sampling.greedy else "rejection" if sampling.seed is None else "match"


def _check_knobs(knobs: Knobs, policy: str) -> None:
    """Raise CapabilityError for limits that this policy would not act on."""
    if knobs.energy != "balanced" and policy.startswith("fixed") and not policy.endswith(GOVERNED):
        raise CapabilityError(f"energy {knobs.energy!r} says how to plan, and policy {policy!r} does not plan; use policy 'adaptive'")
    if knobs.target_ms_per_token is not None and not policy.startswith("adaptive"):
        raise CapabilityError(f"policy {policy!r} does not know target_ms_per_token; use policy 'adaptive', or leave it out")


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError for token ids that are none, and if no token is left."""
    if strange := sorted(token for token in sampling.bias if token >= vocab_size):
        raise ValueError(f"bias needs token ids below {vocab_size}, got {strange}")
    if sum(value == -math.inf for value in sampling.bias.values()) == vocab_size:
        raise ValueError("the bias forbids every token; leave one")


class _TextOut:
    """Rounds in, chunks out: detokenised, cut at stop strings, with the trace saying what was really delivered."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)

    def push(self, round: Round, stop_ids: frozenset[int]) -> Chunk:
        began = perf_counter()
        text, n, stopped = "", len(round.token_ids), False
        for i, token in enumerate(round.token_ids):
            if token in stop_ids:
                break
            piece, stopped = self._stops.push(self._detokenizer.push(token))
            text += piece
            if stopped:
                n = i + 1
                break
        finish: Finish | None = "stop" if stopped else round.finish
        if finish is not None and not stopped:
            text += self.flush()
        trace = replace(round.trace, kept=min(round.trace.kept, n), emitted=n, text_ms=(perf_counter() - began) * 1e3)
        return Chunk(
            text=text, token_ids=round.token_ids[:n], origins=round.origins[:n], finish=finish, trace=trace, logprobs=round.logprobs[:n]
        )

    def flush(self) -> str:
        piece, stopped = self._stops.push(self._detokenizer.flush())
        return piece if stopped else piece + self._stops.flush()


class Tally:
    """Adds up chunks into an Answer; front ends that stream use it too."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._first: float | None = None
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        if self._first is None and chunk.token_ids:
            self._first = perf_counter()
        self._chunks.append(chunk)

    def answer(self, *, prompt_tokens: int) -> Answer:
        traces: list[RoundTrace] = [c.trace for c in self._chunks if c.trace is not None]
        logprobs: list[TokenLogProb] = [p for c in self._chunks for p in c.logprobs]
        token_ids = [t for c in self._chunks for t in c.token_ids]
        busy_ms = sum(t.round_ms + t.text_ms for t in traces)
        stats = Stats(
            rounds=len(traces),
            drafted=sum(t.drafted for t in traces),
            kept=sum(t.kept for t in traces),
            tokens=len(token_ids),
            ttft_s=(self._first or perf_counter()) - self._began,
            tok_s=len(token_ids) / (busy_ms / 1e3) if busy_ms else 0.0,
            overhead_share=sum(t.overhead_ms for t in traces) / busy_ms if busy_ms else 0.0,
            host_bytes_copied=sum(t.host_bytes_copied for t in traces),
        )
        return Answer(
            text="".join(c.text for c in self._chunks),
            token_ids=tuple(token_ids),
            finish=(self._chunks[-1].finish if self._chunks else None) or "cancelled",
            prompt_tokens=prompt_tokens,
            stats=stats,
            traces=tuple(traces),
            logprobs=tuple(logprobs),
        )
