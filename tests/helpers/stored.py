"""The smallest model package that the store takes: whole on disk, of no use to an engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from edgespec.core.decoder import DecoderConfig
from edgespec.core.manifest import Artifact, FileRecord, Manifest, TokenizerSpec


def _write(path: Path, content: bytes) -> FileRecord:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return FileRecord(sha256=hashlib.sha256(content).hexdigest(), nbytes=len(content))


def write_package(
    folder: Path, name: str, weights: bytes = b"weights", *, engines: tuple[str, ...] = ("onnx",), recipe: str = "int8"
) -> Manifest:
    """Write manifest.json, tokenizer.json and one file per engine below `folder`."""
    decoder = DecoderConfig(
        family="llama",
        layers=1,
        hidden=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        ffn=16,
        vocab_rows=16,
        max_context=64,
        norm_eps=1e-5,
        rope_theta=1e4,
        tied=True,
    )
    artifacts = tuple(
        Artifact(
            engine=engine,
            recipe=recipe,
            folder=f"{engine}-{recipe}",
            files={f"{engine}-{recipe}/weights.bin": _write(folder / f"{engine}-{recipe}" / "weights.bin", weights)},
            weight_bytes=len(weights),
            bits_per_weight=8.0,
        )
        for engine in engines
    )
    manifest = Manifest(
        name=name,
        decoder=decoder,
        vocab_size=16,
        vocab_digest="0" * 64,
        tokenizer=TokenizerSpec(kind="tokenizers", file="tokenizer.json", add_bos=False, bos_id=None, stop_ids=(15,)),
        files={"tokenizer.json": _write(folder / "tokenizer.json", b"{}")},
        artifacts=artifacts,
        source={"format": "test"},
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return manifest
