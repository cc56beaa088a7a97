"""Options that several commands share, each written once. A command takes a whole group as one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from edgespec_apps.console import in_background, say, silence_stdout

if TYPE_CHECKING:
    from edgespec.core.plan import Knobs
    from edgespec.core.sampling import Sampling
    from edgespec.orchestrator.runtime import Runtime
    from edgespec.orchestrator.session import Session

DEFAULT_MODEL = "smollm2-135m"

_MODEL = "Model and speculation"
_SAMPLING = "Sampling"


class EngineName(StrEnum):
    auto = "auto"
    onnx = "onnx"
    mlx = "mlx"
    reference = "reference"


class UnitName(StrEnum):
    cpu = "cpu"
    gpu = "gpu"
    npu = "npu"


class EnergyName(StrEnum):
    fast = "fast"
    balanced = "balanced"
    saver = "saver"


class VerifyName(StrEnum):
    auto = "auto"
    greedy = "greedy"
    match = "match"
    rejection = "rejection"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What answers, what guesses, and how much is guessed."""

    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="Package name (see `edgespec models`), NAME@RECIPE, or a package folder.", rich_help_panel=_MODEL
        ),
    ] = DEFAULT_MODEL
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "-d",
            metavar="none|ngram|auto|MODEL",
            help="What guesses ahead: nothing, the text so far, another model, two of these (ngram,MODEL), or the package's own choice.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="fixed:N|window|entropy|adaptive",
            help="How many tokens to guess each round: always N, by recent success, by the draft's entropy, or by measured cost.",
            rich_help_panel=_MODEL,
        ),
    ] = "adaptive"
    energy: Annotated[
        EnergyName,
        typer.Option(
            "--energy", help="What the adaptive policy saves: time, joules where a meter exists, or both.", rich_help_panel=_MODEL
        ),
    ] = EnergyName.balanced
    min_battery: Annotated[
        float,
        typer.Option(
            "--min-battery", min=0.0, max=1.0, metavar="SHARE", help="On battery below this share, guess nothing.", rich_help_panel=_MODEL
        ),
    ] = 0.0
    max_draft: Annotated[
        int, typer.Option("--max-draft", min=0, max=64, metavar="N", help="Most tokens that any policy may guess.", rich_help_panel=_MODEL)
    ] = 16
    verify: Annotated[
        VerifyName,
        typer.Option(
            "--verify",
            help="Rule that accepts guesses; all are exact. auto: greedy, with a seed match (same text with any draft), else rejection.",
            rich_help_panel=_MODEL,
        ),
    ] = VerifyName.auto
    engine: Annotated[
        EngineName, typer.Option("--engine", help="Library that runs the model; auto takes the best that works.", rich_help_panel=_MODEL)
    ] = EngineName.auto
    draft_engine: Annotated[EngineName, typer.Option("--draft-engine", help="Library that runs a draft model.", rich_help_panel=_MODEL)] = (
        EngineName.auto
    )
    require_unit: Annotated[
        UnitName | None,
        typer.Option(
            "--require-unit",
            help="Refuse unless this unit does most of the model's or of the draft model's work, as found by running them"
            " (default: run anywhere).",
            rich_help_panel=_MODEL,
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="NAME",
            help="Which of the package's conversions, such as int8 (default: its first).",
            rich_help_panel=_MODEL,
        ),
    ] = None
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context",
            min=1,
            metavar="TOKENS",
            help="Context to reserve memory for (default: chosen from the model).",
            rich_help_panel=_MODEL,
        ),
    ] = None
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads (default: physical cores).", rich_help_panel=_MODEL)
    ] = None

    def load(self) -> Runtime:
        """The loaded model; what there is to say about it goes to stderr. Raises as `edgespec.load` does."""
        import edgespec
        from edgespec_apps import starting

        check_policy(self.policy)
        profile = starting.measured_profile(self.model)
        runtime = in_background(
            lambda: edgespec.load(
                self.model,
                engine=self.engine.value,
                recipe=self.recipe,
                draft=self.draft,
                draft_engine=self.draft_engine.value,
                threads=self.threads,
                profile=profile,
                require_unit=self.require_unit.value if self.require_unit else None,
            )
        )
        if profile is None:
            estimate = in_background(lambda: starting.chip_estimate(runtime.spec, runtime.target.capabilities.unit))
            runtime.profile = estimate or runtime.profile
        for note in runtime.notes:
            say(note)
        return runtime

    def knobs(self) -> Knobs:
        from edgespec.core.plan import Knobs

        return Knobs(max_draft_tokens=self.max_draft, energy=self.energy.value, min_battery=self.min_battery)

    def session(self, runtime: Runtime) -> Session:
        return runtime.session(policy=self.policy, verify=self.verify.value, max_context=self.max_context, knobs=self.knobs())


def check_policy(spec: str) -> None:
    """Raise ValueError now rather than after a model was loaded."""
    from edgespec.scheduling.parse import parse_policy

    parse_policy(spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen; the same law with any draft."""

    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 takes the likeliest token, 1 the model's own law.", rich_help_panel=_SAMPLING)
    ] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", help="Only the K likeliest tokens; 0: all.", rich_help_panel=_SAMPLING)] = 0
    top_p: Annotated[
        float, typer.Option("--top-p", help="Only the likeliest tokens that make up this share; 1: all.", rich_help_panel=_SAMPLING)
    ] = 1.0
    min_p: Annotated[
        float, typer.Option("--min-p", help="Only tokens at least this share of the likeliest; 0: all.", rich_help_panel=_SAMPLING)
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Divides the score of tokens seen before; 1: off.", rich_help_panel=_SAMPLING)
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Subtracted from the score of tokens seen before.", rich_help_panel=_SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="Subtracted once for each time a token was seen.", rich_help_panel=_SAMPLING)
    ] = 0.0
    bias: Annotated[
        list[str] | None,
        typer.Option("--bias", metavar="ID=VALUE", help="Added to the score of a token id; repeatable.", rich_help_panel=_SAMPLING),
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", help="Makes a drawn answer repeatable (default: drawn).", rich_help_panel=_SAMPLING)
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End the answer before this text; repeatable.", rich_help_panel=_SAMPLING),
    ] = None

    def sampling(self, *, logprobs: int | None = None) -> Sampling:
        """Raises ValueError for values that make no sense."""
        from edgespec.core.sampling import Sampling

        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            bias=parse_bias(self.bias or ()),
            seed=self.seed,
            logprobs=logprobs,
        )

    def stops(self) -> tuple[str, ...]:
        stops = tuple(self.stop or ())
        if "" in stops:
            raise ValueError("--stop needs some text, got an empty string")
        return stops


def parse_bias(items: list[str] | tuple[str, ...]) -> Mapping[int, float]:
    """["12=-3.5"] to {12: -3.5}. Raises ValueError."""
    bias: dict[int, float] = {}
    for item in items:
        token, equals, value = item.partition("=")
        try:
            if not equals:
                raise ValueError
            bias[int(token)] = float(value)
        except ValueError:
            raise ValueError(f"--bias needs ID=VALUE with a token id and a number, such as 42=-5, got {item!r}") from None
    return bias


MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Most tokens to answer with.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line on stdout and nothing else.")]


@dataclass(slots=True)
class Settings:
    """What holds for the whole program run; the root context's `obj`."""

    debug: bool = False


def _set_debug(context: typer.Context, value: bool) -> bool:
    if value:
        context.find_root().obj.debug = True
    return value


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_set_debug, is_eager=True)]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose option groups (dataclass parameters) are spread into single options for typer, with --debug added.

    A reader of stdout that has gone away (`| head`) ends the command quietly: it has what it wanted.
    """
    hints = get_type_hints(command, include_extras=True)
    single: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint) and isinstance(hint, type):
            groups[parameter.name] = hint
            single += _options(hint)
        else:
            single.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    single.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

    def call(**values: Any) -> None:
        del values["debug"]
        gathered = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        try:
            command(**values, **gathered)
        except BrokenPipeError:
            silence_stdout()

    functools.update_wrapper(call, command, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    del call.__dict__["__wrapped__"]  # typer would read the groups there instead of the single options
    call.__signature__ = inspect.Signature(single)  # pyright: ignore[reportFunctionMemberAccess]
    call.__annotations__ = {p.name: p.annotation for p in single}
    return call


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(group)
    ]
