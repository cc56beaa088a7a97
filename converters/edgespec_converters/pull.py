"""From a model's name to a package in the store: fetch, convert, install."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Artifact, Manifest, check_name
from edgespec.orchestrator import store
from edgespec.orchestrator.store import Package
from edgespec_converters import fetch as fetching
from edgespec_converters.fetch import Progress, Source, silent
from edgespec_converters.registry import DEFAULT_RECIPE, Entry, HubSource, default_targets, entries, lookup

_HUB = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[\w.-]+(?:/[\w.-]+)*))?")
# An artifact's size as a multiple of its source, on the safe side: 8 bits and scales from a 4-bit GGUF, from 16-bit floats.
_GROWTH_GGUF, _GROWTH_FLOAT = 2.2, 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a pull starts from: exactly one of `entry`, `hub` and `path`, under the name that the package will get.

    What is downloaded for it lies in `source_folder(source)`, whatever the package is called.
    """

    name: str
    source: str
    spec: str
    entry: Entry | None = None
    hub: HubSource | None = None
    path: Path | None = None


def resolve(spec: str, name: str | None = None) -> Origin:
    """Tell a registry name, `hf:org/repo[@revision][/file.gguf]` and a local path apart. Raises ArtifactError with what to do."""
    if spec.startswith("hf:"):
        hub = _parse_hub(spec)
        name = name or _package_name(Path(hub.file).stem if hub.file else hub.repo.split("/")[1])
        return Origin(name=name, source=name, spec=spec, hub=hub)
    path = Path(spec).expanduser()
    if "/" in spec or "\\" in spec or spec.startswith((".", "~")) or path.suffix.lower() in (".gguf", ".safetensors"):
        if not path.exists():
            raise ArtifactError(
                f"{spec} does not exist; give a .gguf file, a folder with .safetensors files or a name from `edgespec models`"
            )
        if (path / store.MANIFEST).is_file():
            raise ArtifactError(f"{spec} is a model package already; use its path as the model: `edgespec chat --model {spec}`")
        path = path.absolute()
        name = name or _package_name(path.stem if path.is_file() else path.name)
        return Origin(name=name, source=name, spec=str(path), path=path)
    if spec.lower() not in {entry.name for entry in entries()} and (made_from := _made_from(spec)):
        origin = resolve(made_from, spec)
        return replace(origin, name=name or spec)
    entry = lookup(spec)
    return Origin(name=name or entry.name, source=entry.name, spec=entry.name, entry=entry)


def _made_from(name: str) -> str | None:
    """What the installed package `name` was pulled from, if that has another name."""
    try:
        pulled = store.find_package(name).manifest.source.get("pull")
    except ArtifactError:
        return None
    return pulled if isinstance(pulled, str) and pulled != name else None


def pull(
    spec: str,
    *,
    name: str | None = None,
    recipe: str | None = None,
    targets: Sequence[str] = (),
    source: Source = "auto",
    force: bool = False,
    discard_source: bool = False,
    accept_terms: Callable[[Entry], bool] | None = None,
    progress: Progress = silent,
    notify: Callable[[str], None] = lambda line: None,
    timeout_s: float = 3600.0,
) -> Package:
    """The package of `spec` in the store, fetched and converted unless it is there with this recipe for all `targets`.

    A package made from the same weights keeps its other artifacts; `force` starts afresh. `accept_terms` is asked about models that
    come under terms. `notify` gets one line about each thing worth saying; `timeout_s` is how long to wait for another process
    at work on the same model. Raises ArtifactError; then the store is as before, and what was downloaded waits for the next try.
    """
    origin = resolve(spec, name)
    check_name(origin.name)
    if discard_source and origin.path is not None:
        raise ValueError(f"{spec} is your own file, not a download; edgespec deletes no file that it did not fetch")
    recipe = recipe or (origin.entry.recipe if origin.entry else DEFAULT_RECIPE)
    targets = tuple(targets) or (origin.entry.targets if origin.entry else default_targets())
    store.sweep()
    with store.lock(origin.name, timeout_s=timeout_s, on_wait=notify):
        present = None if force else _present(origin.name, notify)
        missing = [t for t in targets if present is None or present.manifest.find(t, recipe) is None]
        if present is not None and not missing:
            notify(f"{origin.name} is already there: {present.path} (--force makes it again)")
            if discard_source:
                _discard(origin)
            return present
        _check_terms(origin, accept_terms)
        _check_space(origin, len(missing))
        with store.lock(origin.source, timeout_s=timeout_s, on_wait=notify) if origin.source != origin.name else nullcontext():
            weights = _fetch(origin, source, progress)
        with store.staging(origin.name) as folder:
            manifest = _convert(weights, folder, name=origin.name, recipe=recipe, targets=missing, progress=progress)
            manifest = _described(manifest, origin)
            if present is not None:
                manifest = _with_earlier(manifest, folder, present, notify)
            (folder / store.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
            package = store.install(folder, origin.name)
        if discard_source:
            _discard(origin)
        return package


def _discard(origin: Origin) -> None:
    shutil.rmtree(store.source_folder(origin.source), ignore_errors=True)


def _parse_hub(spec: str) -> HubSource:
    match = _HUB.fullmatch(spec)
    if match is None or ".." in spec:
        raise ArtifactError(f"{spec!r} is no hub model; write hf:org/repo, hf:org/repo@revision or hf:org/repo/file.gguf")
    return HubSource(repo=match["repo"], revision=match["revision"] or "main", file=match["file"])


def _package_name(text: str) -> str:
    return re.sub(r"[^a-z0-9._+-]+", "-", text.lower()).strip("-._+") or "model"


def _present(name: str, notify: Callable[[str], None]) -> Package | None:
    """The installed package, if it is whole."""
    if not store.is_installed(name):
        return None
    try:
        return store.find_package(name)
    except ArtifactError as error:
        notify(f"replacing a damaged package: {error}")
        return None


def _check_terms(origin: Origin, accept_terms: Callable[[Entry], bool] | None) -> None:
    entry = origin.entry
    if entry is None or not entry.needs_acceptance or (accept_terms is not None and accept_terms(entry)):
        return
    raise ArtifactError(f"{entry.name} comes under {entry.terms}: read them, then run again with --accept-license")


def _check_space(origin: Origin, targets: int) -> None:
    """Before anything is downloaded: room for the rest of the source and for every artifact."""
    if origin.entry is not None:
        fetched = fetching.remaining_bytes(origin.entry, store.source_folder(origin.source))
        needed = fetched + int(_GROWTH_GGUF * origin.entry.nbytes) * targets
    elif origin.path is not None:
        needed = int(_source_growth(origin.path)) * targets
    else:  # the hub tells sizes only when asked
        return
    store.check_disk(needed, store.home(), what=origin.name)


def _source_growth(path: Path) -> float:
    if path.is_file():
        return _GROWTH_GGUF * path.stat().st_size
    return _GROWTH_FLOAT * sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _fetch(origin: Origin, source: Source, progress: Progress) -> Path:
    destination = store.source_folder(origin.source)
    if origin.entry is not None:
        return fetching.fetch(origin.entry, destination=destination, progress=progress, source=source)
    if origin.hub is not None:
        return fetching.fetch_hub(origin.hub, destination=destination, progress=progress)
    assert origin.path is not None
    return origin.path


def _convert(weights: Path, folder: Path, *, name: str, recipe: str, targets: Sequence[str], progress: Progress) -> Manifest:
    from edgespec_converters.checkpoint import open_checkpoint
    from edgespec_converters.convert import convert  # here, as it brings the device libraries

    return convert(open_checkpoint(weights), name=name, recipe=recipe, targets=targets, destination=folder, progress=progress)


def _described(manifest: Manifest, origin: Origin) -> Manifest:
    """What only the pull knows: the model's name in the store, its draft, its licence, and how to get it again."""
    entry = origin.entry
    return replace(
        manifest,
        name=origin.name,
        draft=entry.draft if entry else manifest.draft,
        license=entry.license if entry else manifest.license,
        source={**manifest.source, "pull": origin.spec},
    )


def _with_earlier(manifest: Manifest, folder: Path, earlier: Package, notify: Callable[[str], None]) -> Manifest:
    """Take over the artifacts of `earlier` that were not made again, if they come from the same weights."""
    old = earlier.manifest
    if (old.source, old.vocab_digest, old.decoder) != (manifest.source, manifest.vocab_digest, manifest.decoder):
        notify(f"{old.name} was made from other weights before: its {len(old.artifacts)} artifacts are replaced")
        return manifest
    made = {(artifact.engine, artifact.recipe) for artifact in manifest.artifacts}
    kept = tuple(artifact for artifact in old.artifacts if (artifact.engine, artifact.recipe) not in made)
    for artifact in kept:
        _link(earlier.path, folder, artifact)
    return replace(manifest, artifacts=kept + manifest.artifacts)


def _link(earlier: Path, folder: Path, artifact: Artifact) -> None:
    """Hard links where the disk has them: package files never change once written."""
    for file in artifact.files:
        old, new = earlier / file, folder / file
        new.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)
