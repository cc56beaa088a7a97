"""From a checkpoint to a model package: tokenizer, one artifact per target, parity, manifest."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from edgespec.backends.reference import BACKEND as REFERENCE
from edgespec.backends.reference import StoredWeights
from edgespec.core.backend import Backend
from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Artifact, FileRecord, Manifest, Parity, TokenizerSpec, check_name
from edgespec.core.scores import Float32, Int32
from edgespec.orchestrator.text import Tokenizer
from edgespec_converters import parity
from edgespec_converters.checkpoint import Checkpoint
from edgespec_converters.recipes import Recipe, load_recipe

TARGETS = ("onnx", "mlx")
Progress = Callable[[str, int, int], None]  # stage, steps done, steps in all


class Target(Protocol):
    """A module of `edgespec_converters.targets`."""

    def write(
        self, checkpoint: Checkpoint, recipe: Recipe, folder: Path, *, vocab_size: int, progress: Callable[[int, int], None] | None
    ) -> Artifact: ...


def convert(
    checkpoint: Checkpoint,
    *,
    name: str,
    recipe: str,
    targets: Sequence[str],
    destination: Path,
    progress: Progress = lambda stage, done, total: None,
) -> Manifest:
    """Write a whole package into the folder `destination`, manifest last, and return the manifest.

    `recipe` is a name or a .toml file; `targets` are engines. Raises ArtifactError for a source whose tokenizer and weights do not
    belong together, and for an artifact that misses its recipe's gate. Making the folder appear in the store in one step is the
    caller's affair.
    """
    check_name(name)
    chosen = load_recipe(recipe)
    if unknown := sorted(set(targets) - set(TARGETS)):
        raise ArtifactError(f"unknown targets {unknown}; there are {', '.join(TARGETS)}")
    tokenizer = _open_tokenizer(checkpoint)
    destination.mkdir(parents=True, exist_ok=True)
    spec, files = _write_tokenizer(checkpoint, destination)
    manifest = Manifest(
        name=name,
        decoder=checkpoint.config,
        vocab_size=tokenizer.vocab_size,
        vocab_digest=tokenizer.digest(),
        tokenizer=spec,
        files=files,
        source=checkpoint.source,
        license=checkpoint.license,
    )
    once = dict.fromkeys(targets)
    artifacts = [_write_artifact(checkpoint, chosen, target, destination, tokenizer.vocab_size, progress) for target in once]
    measured = _measure(checkpoint, tokenizer, manifest, artifacts, destination, progress)
    for artifact, numbers in zip(artifacts, measured, strict=True):
        parity.check_gate(numbers, chosen.gate, f"{name} as {artifact.folder}")
    manifest = replace(manifest, artifacts=tuple(replace(a, parity=p) for a, p in zip(artifacts, measured, strict=True)))
    (destination / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The source's tokenizer, checked against the rows that its ids were trained on."""
    files, rows = checkpoint.tokenizer, checkpoint.config.vocab_rows
    special = [*files.stop_ids, *([] if files.bos_id is None else [files.bos_id])]
    beyond = sorted(i for i in {*special, files.vocab_size - 1} if not 0 <= i < rows)
    if beyond:
        raise ArtifactError(
            f"{checkpoint.name}: its tokenizer has ids {beyond}, its embedding {rows} rows; tokenizer and weights do not belong together"
        )
    return Tokenizer.from_content(
        files.content,
        kind=files.kind,
        vocab_size=files.vocab_size,
        add_bos=files.add_bos,
        bos_id=files.bos_id,
        stop_ids=files.stop_ids,
        chat_template=files.chat_template,
    )


def _write_tokenizer(checkpoint: Checkpoint, destination: Path) -> tuple[TokenizerSpec, dict[str, FileRecord]]:
    source = checkpoint.tokenizer
    kind = "tokenizers" if source.kind == "tokenizers" else "sentencepiece"
    contents = {"tokenizer.json" if kind == "tokenizers" else "tokenizer.model": source.content}
    if source.chat_template is not None:
        contents["chat_template.jinja"] = source.chat_template.encode()
    records: dict[str, FileRecord] = {}
    for file, content in contents.items():
        (destination / file).write_bytes(content)
        records[file] = FileRecord(sha256=hashlib.sha256(content).hexdigest(), nbytes=len(content))
    spec = TokenizerSpec(
        kind=kind,
        file=next(iter(contents)),
        add_bos=source.add_bos,
        bos_id=source.bos_id,
        stop_ids=source.stop_ids,
        chat_template="chat_template.jinja" if source.chat_template is not None else None,
    )
    return spec, records


def _write_artifact(
    checkpoint: Checkpoint, recipe: Recipe, target: str, destination: Path, vocab_size: int, progress: Progress
) -> Artifact:
    module: Target = importlib.import_module(f"edgespec_converters.targets.{target}")  # pyright: ignore[reportAssignmentType]
    folder = destination / f"{target}-{recipe.name}"
    return module.write(
        checkpoint, recipe, folder, vocab_size=vocab_size, progress=lambda done, total: progress(f"convert for {target}", done, total)
    )


def _measure(
    checkpoint: Checkpoint, tokenizer: Tokenizer, manifest: Manifest, artifacts: Sequence[Artifact], package: Path, progress: Progress
) -> list[Parity]:
    """Parity of every artifact; the float32 logits are computed once."""
    sequences = parity.token_sequences(tokenizer)
    expected = parity.streamed_logits(
        checkpoint.config,
        checkpoint.tensor,
        sequences,
        vocab_size=manifest.vocab_size,
        progress=lambda done, total: progress("reference", done, total),
    )
    out: list[Parity] = []
    for done, artifact in enumerate(artifacts):
        out.append(_compare(expected, sequences, manifest, artifact, package))
        progress("compare", done + 1, len(artifacts))
    return out


def _compare(expected: Sequence[Float32], sequences: Sequence[Int32], manifest: Manifest, artifact: Artifact, package: Path) -> Parity:
    """By the artifact's own engine; where that is missing or slow, by its weights through the reference's maths, if they can be read."""
    readable = artifact.engine in REFERENCE.artifact_engines
    backend: Backend = importlib.import_module(f"edgespec.backends.{artifact.engine}").BACKEND
    if not readable or backend.why_not() is None:
        engine = backend.load(package, manifest, artifact)
        try:
            if not readable or engine.capabilities.unit != "cpu":
                return parity.compare(expected, parity.engine_logits(engine, sequences))
        finally:
            engine.close()
    weights = StoredWeights(package / artifact.folder)
    actual = parity.streamed_logits(manifest.decoder, weights.__getitem__, sequences, vocab_size=manifest.vocab_size)
    return parity.compare(expected, actual)
