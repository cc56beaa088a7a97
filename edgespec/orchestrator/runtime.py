"""A loaded model with its tokenizer and its draft, shared by any number of sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from edgespec.core.device import DeviceProfile, PowerThermalState
from edgespec.core.drafter import Drafter
from edgespec.core.engine import Engine, ModelSpec, TokenBatch
from edgespec.core.errors import ArtifactError, CapabilityError, DeviceError
from edgespec.core.manifest import Manifest
from edgespec.core.placement import check_placement, check_unit
from edgespec.core.plan import Knobs
from edgespec.core.trace import RoundTrace
from edgespec.drafting.ahead import AheadDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.none import NoDrafter
from edgespec.drafting.pool import Pool
from edgespec.orchestrator import engines
from edgespec.orchestrator.session import Learnt, Session
from edgespec.orchestrator.store import Package, find_package
from edgespec.orchestrator.text import Tokenizer
from edgespec.scheduling.parse import DEFAULT as DEFAULT_POLICY
from edgespec.scheduling.parse import governed, parse_policy
from edgespec.scheduling.sensors import Sensors, default_meter, default_sources

_REMEMBERED_ROUNDS = 256


class Runtime:
    """Owns the engines; sessions own caches and drafters. Thread-safe: engines run one forward pass at a time."""

    def __init__(
        self,
        target: Engine,
        tokenizer: Tokenizer,
        *,
        draft: str = "ngram",
        draft_engine: Engine | None = None,
        manifest: Manifest | None = None,
        engine_name: str = "",
        profile: DeviceProfile | None = None,
        sensors: Sensors | None = None,
        meter_mj: Callable[[], float] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """`draft` is "none", or one or both of "ngram" and the name of the model in `draft_engine`, with a comma between them.

        The first is the one that policies mean which do not choose. CapabilityError if the two models do not fit.
        """
        self.drafts = drafts_of(draft)
        named = [name for name in self.drafts if name not in MODELLESS]
        if draft_engine is not None:
            check_pair(target.spec, draft_engine.spec)
        if len(named) != (draft_engine is not None):
            raise ValueError(f"draft {draft!r} and its engine do not fit: it names {named or 'no model'}")
        self.target, self.tokenizer, self.manifest = target, tokenizer, manifest
        self.draft_name, self.draft_engine, self.engine_name = draft, draft_engine, engine_name
        self.profile = profile or DeviceProfile.generic()
        self.meter_mj = meter_mj
        self._sensors = sensors
        self._open = ExitStack()
        if sensors is not None:
            self._open.enter_context(sensors)
        self._recent: dict[str, list[RoundTrace]] = {}
        self._left: dict[str, Learnt] = {}
        self.notes = notes  # what the user should know about how this was put together, a line each

    @property
    def spec(self) -> ModelSpec:
        return self.target.spec

    def new_drafters(self, max_context: int, draft: str | None = None) -> Pool:
        """Of the drafts that `draft` names, default all. ValueError for one that was not loaded."""
        names = self.drafts if draft is None else drafts_of(draft)
        if strange := [name for name in names if name not in (*self.drafts, *MODELLESS)]:
            raise ValueError(f"draft {strange[0]!r} was not loaded; this model was opened with {self.draft_name}")
        return Pool(*(self._drafter(name, max_context) for name in names))

    def _drafter(self, name: str, max_context: int) -> Drafter:
        if name in MODELLESS:
            return MODELLESS[name]()
        assert self.draft_engine is not None
        drafter = ModelDrafter(self.draft_engine, capacity=max_context)
        apart = self.draft_engine.capabilities.unit != self.target.capabilities.unit
        measured = self.profile.overlap_penalty is not None and not self.profile.estimated  # an estimate is of two units
        return AheadDrafter(drafter) if apart or measured else drafter

    def power(self) -> PowerThermalState | None:
        """Battery and heat as last read; None without sensors. Never blocks."""
        return self._sensors.state() if self._sensors is not None else None

    def recall(self, policy: str) -> Learnt:
        """What sessions with this policy learnt here, so that a new one need not learn the machine's costs again.

        A policy that a closed session left behind goes to one session only; the others get the last rounds, to be read anew.
        """
        rounds = self._recent.get(policy, [])
        left = self._left.pop(policy, None)
        if left is not None and rounds and left.history and left.history[-1] is rounds[-1]:
            return left
        return Learnt(governed(parse_policy(policy)), list(rounds))

    def remember(self, policy: str, history: Sequence[RoundTrace]) -> None:
        self._recent[policy] = list(history[-_REMEMBERED_ROUNDS:])

    def leave(self, policy: str, learnt: Learnt) -> None:
        """A closing session's policy with all that it has folded."""
        self._left[policy] = learnt

    def session(
        self,
        *,
        policy: str = DEFAULT_POLICY,
        verify: str = "auto",
        max_context: int | None = None,
        knobs: Knobs | None = None,
        draft: str | None = None,
    ) -> Session:
        """`draft`: which of the loaded drafts may guess, default all."""
        return Session(self, policy=policy, verify=verify, max_context=max_context, knobs=knobs, draft=draft)

    def close(self) -> None:
        """Release the engines and stop the sensors. Idempotent."""
        self._open.close()
        self.target.close()
        if self.draft_engine is not None:
            self.draft_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


MODELLESS: Mapping[str, Callable[[], Drafter]] = {"none": NoDrafter, "ngram": NgramDrafter}


def drafts_of(text: str) -> tuple[str, ...]:
    """The names in "A,B". ValueError unless it is one of each at most, at most one model, and none stands alone."""
    names = tuple(name.strip() for name in text.split(","))
    models = [name for name in names if name not in MODELLESS]
    if not all(names) or len(set(names)) < len(names) or len(models) > 1 or ("none" in names and len(names) > 1):
        raise ValueError(f"draft must be none, ngram, a model, or ngram and a model with a comma between them; got {text!r}")
    return names


def check_pair(target: ModelSpec, draft: ModelSpec) -> None:
    """Raise CapabilityError unless every token id means the same bytes to both models."""
    if (target.vocab_digest, target.vocab_size) != (draft.vocab_digest, draft.vocab_size):
        raise CapabilityError(
            f"{draft.name} cannot draft for {target.name}: their vocabularies differ ({draft.vocab_size} and {target.vocab_size} tokens,"
            f" digests {draft.vocab_digest[:8]} and {target.vocab_digest[:8]}); choose a draft of the same model family, or --draft ngram"
        )


def load(
    model: str | Path,
    *,
    engine: str = "auto",
    recipe: str | None = None,
    draft: str = "auto",
    draft_engine: str = "auto",
    threads: int | None = None,
    profile: DeviceProfile | None = None,
    require_unit: str | None = None,
) -> Runtime:
    """Load a model package, by name (`NAME` or `NAME@RECIPE`) or folder, with its draft.

    `draft`: "none", "ngram", another package, "ngram" and a package with a comma between them (the policy chooses every round), or
    "auto": the draft that the package names, if it is installed, and n-grams.
    `require_unit` ("cpu", "gpu", "npu"): refuse unless it does the largest share of the target's or of the draft model's work, which
    is found out by running them (see `edgespec.core.placement`).
    Raises ArtifactError for missing or damaged packages, CapabilityError for parts that do not fit or cannot run here, ValueError
    for a `draft_engine` without a draft model, for fewer than one of `threads` and for a unit that is none.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be >= 1, got {threads}; leave it out for one per physical core")
    if require_unit is not None:
        check_unit(require_unit)
    package, recipe = _resolve(model, recipe)
    chosen, draft_package, draft_recipe, notes = _choose_draft(draft, package)
    if draft_package is None and draft_engine != "auto":
        raise ValueError(f"draft engine {draft_engine!r} has no model to run: the draft is {chosen!r}; name a draft model or leave it out")
    target, engine_name = engines.load(package, engine=engine, recipe=recipe, threads=threads)
    loaded_draft: Engine | None = None
    try:
        if draft_package is not None:
            check_pair(package.manifest.spec(), draft_package.manifest.spec())
            loaded_draft, _ = engines.load(draft_package, engine=draft_engine, recipe=draft_recipe, threads=threads)
            if (why := _cannot_run(loaded_draft)) is not None:
                loaded_draft.close()
                notes = (*notes, f"the draft {draft_package.manifest.name} loads but does not run ({why}); drafting with n-grams")
                loaded_draft, chosen = None, "ngram"
        if require_unit is not None:
            check_placement(require_unit, target, loaded_draft)
        tokenizer = Tokenizer.load(package.path, package.manifest.tokenizer, package.manifest.vocab_size)
        return Runtime(
            target,
            tokenizer,
            draft=chosen,
            draft_engine=loaded_draft,
            manifest=package.manifest,
            engine_name=engine_name,
            profile=profile,
            sensors=Sensors(default_sources()),
            meter_mj=default_meter(),
            notes=notes,
        )
    except BaseException:
        target.close()
        if loaded_draft is not None:
            loaded_draft.close()
        raise


def open_session(
    model: str | Path,
    *,
    engine: str = "auto",
    recipe: str | None = None,
    draft: str = "auto",
    draft_engine: str = "auto",
    threads: int | None = None,
    profile: DeviceProfile | None = None,
    require_unit: str | None = None,
    policy: str = DEFAULT_POLICY,
    verify: str = "auto",
    max_context: int | None = None,
    knobs: Knobs | None = None,
) -> Session:
    """A session that owns its model: `load` and `Runtime.session` in one. Close it, or use it in a `with` block."""
    runtime = load(
        model,
        engine=engine,
        recipe=recipe,
        draft=draft,
        draft_engine=draft_engine,
        threads=threads,
        profile=profile,
        require_unit=require_unit,
    )
    try:
        return Session(runtime, policy=policy, verify=verify, max_context=max_context, knobs=knobs, owns_runtime=True)
    except BaseException:
        runtime.close()
        raise


def _resolve(model: str | Path, recipe: str | None) -> tuple[Package, str | None]:
    """The package and the recipe that `NAME@RECIPE`, a name or a folder mean."""
    if isinstance(model, str) and "@" in model and not Path(model).exists():
        name, _, suffix = model.rpartition("@")
        if recipe not in (None, suffix):
            raise ValueError(f"{model!r} names recipe {suffix!r}, but recipe {recipe!r} was asked for")
        return find_package(name), suffix
    return find_package(model), recipe


def _cannot_run(engine: Engine) -> str | None:
    """Why not even one token can be scored: some drivers fail at the first pass only, and a draft is not worth an answer."""
    try:
        (scores,) = engine.forward([(TokenBatch.chain([0]), engine.new_cache(2))])
        scores.logits.argmax()
    except DeviceError as error:
        return str(error)
    return None


def _choose_draft(draft: str, package: Package) -> tuple[str, Package | None, str | None, tuple[str, ...]]:
    """(names for Runtime, the draft's package, its recipe, notes)."""
    if draft != "auto":
        names = drafts_of(draft)
        model = next((name for name in names if name not in MODELLESS), None)
        if model is None:
            return draft, None, None, ()
        found, recipe = _resolve(model, None)
        return ",".join(found.manifest.name if name == model else name for name in names), found, recipe, ()
    if package.manifest.draft is None:
        return "ngram", None, None, ()
    try:
        found = find_package(package.manifest.draft)
    except ArtifactError:
        wanted = package.manifest.draft
        return "ngram", None, None, (f"its draft {wanted} is not installed (edgespec pull {wanted}); drafting with n-grams",)
    return f"{found.manifest.name},ngram", found, None, ()
