"""A checkpoint converted into a package folder in one call, without the conversion pipeline around it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from edgespec.core.manifest import Manifest, TokenizerSpec
from edgespec_converters.checkpoint import Checkpoint
from edgespec_converters.recipes import Recipe, load_recipe


def write_package(target: ModuleType, checkpoint: Checkpoint, folder: Path, recipe: Recipe | str, **options: Any) -> Manifest:
    """`target`: a module of `edgespec_converters.targets`. The manifest names one artifact; tokenizer files are not written."""
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    tokenizer = checkpoint.tokenizer
    artifact = target.write(
        checkpoint, recipe, folder / f"{target.ENGINE}-{recipe.name}", vocab_size=tokenizer.vocab_size, progress=None, **options
    )
    return Manifest(
        name=checkpoint.name,
        decoder=checkpoint.config,
        vocab_size=tokenizer.vocab_size,
        vocab_digest="tiny",
        tokenizer=TokenizerSpec(
            kind="tokenizers", file="tokenizer.json", add_bos=tokenizer.add_bos, bos_id=tokenizer.bos_id, stop_ids=tokenizer.stop_ids
        ),
        files={},
        artifacts=(artifact,),
    )
