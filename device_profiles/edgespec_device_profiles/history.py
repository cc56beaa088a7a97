"""Measured profiles on disk: `<folder>/<machine>/<date>-<model>.toml`, each with its report beside it. Nothing is ever overwritten."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from edgespec.core.errors import ArtifactError
from edgespec_device_profiles.measured import Measured, parse, to_toml


def machine_name(processor: str, cores: int) -> str:
    """A folder name for a machine, e.g. "intel-xeon-8375c-2-cores"."""
    words = "".join(c.lower() if c.isascii() and c.isalnum() else " " for c in processor.replace("(R)", "").replace("(TM)", "")).split()
    return "-".join([*words, str(cores), "cores"])[:80]


def load(file: Path) -> Measured:
    """ArtifactError if there is no such file or it is damaged."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ArtifactError(f"cannot read the profile {file}: {error.strerror}; `edgespec profile` makes one") from error
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{file} is not UTF-8 text") from error
    return parse(text, origin=str(file))


def save(measured: Measured, folder: Path) -> Path:
    """Write it as a new file and return its path. A crash leaves the old files and no half-written one."""
    home = folder / measured.machine.name
    home.mkdir(parents=True, exist_ok=True)
    stamp = measured.date[:19].replace("-", "").replace(":", "").replace("T", "-")
    model = _file_words(measured.model.name)
    for n in range(1, 1000):
        file = home / f"{stamp}-{model}{'' if n == 1 else f'-{n}'}.toml"
        if not file.exists():
            write_whole(file, to_toml(measured))
            return file
    raise ArtifactError(f"{home} holds a thousand profiles of the same second; remove some")


def write_whole(file: Path, text: str) -> None:
    """All of it or nothing: readers never see a part."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def latest(folder: Path, machine: str, *, model: str, on_damaged: Callable[[ArtifactError], None] = lambda error: None) -> Measured | None:
    """The newest usable profile of this machine: of this model before others, complete ones before interrupted ones.

    Reads the likeliest files first and no more than it must: programs ask at every start.
    """
    found: list[Measured] = []
    files = (folder / machine).glob("*.toml")
    for file in sorted(files, key=lambda file: (_file_words(model) in file.stem, file.name), reverse=True):
        try:
            measured = load(file)
        except ArtifactError as error:
            on_damaged(error)
            continue
        if measured.usable:
            found.append(measured)
            if measured.complete and measured.model.name == model:
                break
    return max(found, key=lambda m: (m.model.name == model, m.complete, m.date), default=None)


def _file_words(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name)
