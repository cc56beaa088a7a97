"""`edgespec pull`, `convert` and `models`: getting models into the store, and what is there."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec_apps.console import complain, progress_bar, say
from edgespec_apps.options import AsJson

if TYPE_CHECKING:
    from edgespec.orchestrator.store import Package
    from edgespec_converters.registry import Entry

SCHEMA = "edgespec.models/1"
AGREES = 0.8  # argmax agreement with the source below which a conversion deserves a warning

Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name in the store (default: from the source).")]
Recipe = Annotated[
    str | None, typer.Option("--recipe", metavar="NAME", help="Weight format, such as int8 or int4 (default: the model's own).")
]
Targets = Annotated[str, typer.Option("--targets", metavar="onnx,mlx", help="Engines to convert for (default: the model's own).")]
Force = Annotated[bool, typer.Option("--force", help="Make the package afresh even if it is there.")]
Accept = Annotated[bool, typer.Option("--accept-license", help="Accept the terms that some models come under.")]


def pull(
    spec: Annotated[str, typer.Argument(metavar="NAME|hf:ORG/REPO|PATH", help="A known model, a hub repository, a GGUF file or folder.")],
    name: Name = None,
    recipe: Recipe = None,
    targets: Targets = "",
    force: Force = False,
    accept_license: Accept = False,
    discard_source: Annotated[bool, typer.Option("--discard-source", help="Delete the downloaded weights after converting.")] = False,
) -> None:
    """Fetch a model, convert it and put it into the store. Goes on where an interrupted pull stopped."""
    _pull(spec, name=name, recipe=recipe, targets=targets, force=force, accept=accept_license, discard_source=discard_source)


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A GGUF file, a folder with safetensors, or a model pulled before.")],
    name: Name = None,
    recipe: Recipe = None,
    targets: Targets = "",
    force: Force = False,
) -> None:
    """Convert weights to a model package, measure it against the reference, and put it into the store."""
    _pull(source, name=name, recipe=recipe, targets=targets, force=force, accept=False, discard_source=False)


def _pull(spec: str, *, name: str | None, recipe: str | None, targets: str, force: bool, accept: bool, discard_source: bool) -> None:
    from edgespec_converters.pull import pull as fetch_and_convert

    engines = tuple(target.strip() for target in targets.split(",") if target.strip())
    if unknown := sorted(set(engines) - {"onnx", "mlx"}):
        raise ValueError(f"--targets knows onnx and mlx, got {', '.join(unknown)}")
    if targets and not engines:
        raise ValueError(f"--targets needs onnx, mlx or both, got {targets!r}")
    with progress_bar(name or spec) as progress:
        package = fetch_and_convert(
            spec,
            name=name,
            recipe=recipe,
            targets=engines,
            force=force,
            discard_source=discard_source,
            accept_terms=lambda entry: accept or _agreed(entry),
            progress=progress,
            notify=say,
        )
    _print_package(package)
    _advise(package, recipe)


def _advise(package: Package, asked: str | None) -> None:
    """How to use the recipe just made, and whether it is to be trusted."""
    recipes = [artifact.recipe for artifact in package.manifest.artifacts]
    recipe = asked if asked in recipes else recipes[-1]
    for artifact in package.manifest.artifacts:
        agreement = artifact.parity.argmax_agreement if artifact.parity else 1.0
        if artifact.recipe == recipe and agreement < AGREES:
            say(
                f"Mind: {artifact.engine} {recipe} chose the original's likeliest token at {agreement:.0%} of the positions only;"
                " its answers will be worse"
            )
    say(f"Talk with it: edgespec chat --model {package.name}" + ("" if recipe == recipes[0] else f"@{recipe}"))


def _agreed(entry: Entry) -> bool:
    """Ask, if there is somebody to ask."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return typer.confirm(f"{entry.name} comes under {entry.terms}. Do you accept them?", err=True)


def models(
    verify: Annotated[bool, typer.Option("--verify", help="Compare every byte with its checksum.")] = False,
    remove: Annotated[str | None, typer.Option("--remove", metavar="NAME", help="Delete this model.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the models in the store, and those that can be pulled by name."""
    from edgespec.core.errors import ArtifactError
    from edgespec.orchestrator import store

    if remove is not None:
        if verify or as_json:
            raise ValueError("--remove goes alone; list or verify in a second command")
        store.remove(remove)
        say(f"removed {remove}")
        return
    damaged: dict[str, str] = {}
    packages = store.list_packages(lambda name, error: damaged.update({name: str(error)}))
    if verify:
        for package in packages:
            try:
                with progress_bar(package.name) as progress:
                    store.verify(package, lambda done, total, show=progress: show("verifying", done, total))
            except ArtifactError as error:
                damaged[package.name] = str(error)
    if as_json:
        whole = [summary(package) for package in packages if package.name not in damaged]
        print(json.dumps({"schema": SCHEMA, "home": str(store.home()), "packages": whole, "damaged": damaged}), flush=True)
    else:
        for package in packages:
            if package.name not in damaged and verify:
                print(f"{package.name}: ok")
            elif package.name not in damaged:
                _print_package(package)
        for name in damaged:
            print(f"{name}: damaged")
        if not verify:
            _print_known({package.name for package in packages} | damaged.keys())
    for problem in damaged.values():
        complain(problem)
    if damaged:
        raise typer.Exit(1)


def summary(package: Package) -> dict[str, Any]:
    manifest = package.manifest
    return {
        "name": manifest.name,
        "path": str(package.path),
        "nbytes": sum(record.nbytes for _, record in package.records()),
        "license": manifest.license,
        "draft": manifest.draft,
        "max_context": manifest.decoder.max_context,
        "artifacts": [
            {
                "engine": artifact.engine,
                "recipe": artifact.recipe,
                "weight_bytes": artifact.weight_bytes,
                "bits_per_weight": artifact.bits_per_weight,
                "width_invariant": artifact.width_invariant,
                "parity": artifact.parity
                and {"argmax_agreement": artifact.parity.argmax_agreement, "kl": artifact.parity.kl, "n": artifact.parity.n},
            }
            for artifact in manifest.artifacts
        ],
    }


def _print_package(package: Package) -> None:
    from edgespec.orchestrator.store import megabytes

    about = summary(package)
    draft = f", drafted for by {about['draft']}" if about["draft"] else ""
    print(f"{about['name']}  {megabytes(about['nbytes'])}{draft}  {about['path']}")
    for artifact in about["artifacts"]:
        parity = artifact["parity"]
        checked = (
            f"argmax agreement {parity['argmax_agreement']:.3f}, KL {parity['kl']:.4f} nats over {parity['n']} positions"
            if parity
            else "not compared with the reference"
        )
        print(f"  {artifact['engine']} {artifact['recipe']}: {artifact['bits_per_weight']:.2f} bits per weight; {checked}")


def _print_known(present: set[str]) -> None:
    from edgespec.orchestrator.store import megabytes
    from edgespec_converters.registry import entries

    missing = [entry for entry in entries() if entry.name not in present]
    if missing:
        print("Can be pulled with `edgespec pull NAME`:")
    for entry in missing:
        print(f"  {entry.name}  {megabytes(entry.nbytes)}, {entry.license}: {entry.description}")
