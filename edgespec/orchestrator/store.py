"""Model packages on disk: find, list, verify, install under a lock.

$EDGESPEC_HOME/
  packages/<name>/      whole model packages, each with its manifest.json
  sources/<name>/       downloaded weights, kept for other recipes
  tmp/<name>/           new: a package being written; old: the one being replaced; gone: one being removed
  locks/<name>.lock

A package is written in tmp/ and renamed into place, so packages/ never holds half a package: whatever a killed process
left in tmp/ is put right by the next one that takes the lock. Reading needs no lock.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

from edgespec.core.errors import ArtifactError, ContractError
from edgespec.core.manifest import FileRecord, Manifest, check_name

MANIFEST = "manifest.json"
_MANIFEST_LIMIT_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20
_held: set[str] = set()  # names whose lock this process holds


class NotInstalled(ArtifactError):
    """The store holds no package `name`; it holds those in `installed`."""

    def __init__(self, name: str, installed: Sequence[str]) -> None:
        self.name, self.installed = name, tuple(installed)
        self.what = f"no model {name!r} in the store {home()} (installed: {', '.join(installed) or 'none'})"
        near = difflib.get_close_matches(name.lower(), installed, n=1)
        guess = f"did you mean {near[0]}? If not, run" if near else "run"
        super().__init__(f"{self.what}; {guess} `edgespec pull {name}`")


@dataclass(frozen=True, slots=True)
class Package:
    """A model package whose manifest is whole and whose files have the sizes it records."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    def records(self) -> Iterator[tuple[str, FileRecord]]:
        """Every file of the package but the manifest: its path relative to the package, its record."""
        return _records(self.manifest)


# ---- finding


def home() -> Path:
    """The store: $EDGESPEC_HOME, or the platform's folder for user data. It need not exist. ArtifactError if it is a file."""
    chosen = os.environ.get("EDGESPEC_HOME")
    if not chosen:
        return platformdirs.user_data_path("edgespec", appauthor=False)
    folder = Path(chosen).expanduser().absolute()
    if folder.is_file():
        raise ArtifactError(f"EDGESPEC_HOME names {folder}, which is a file; set it to a folder")
    return folder


def source_folder(name: str) -> Path:
    """Where the downloaded weights of `name` are kept; it need not exist."""
    check_name(name)
    return home() / "sources" / name


def find_package(name_or_path: str | Path) -> Package:
    """The package of this name in the store, or the package in this folder.

    Raises ArtifactError that says what to run if there is none, or if a file is missing or has the wrong size.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or _looks_like_path(text):
        return _open_at(Path(text).expanduser())
    if text.startswith("hf:"):
        raise ArtifactError(f"{text} is not in the store under this name; run `edgespec pull {text}` and use the name that it prints")
    check_name(text)
    package = _find_installed(text)
    if package is None:
        raise NotInstalled(text, _names())
    return package


def is_installed(name: str) -> bool:
    """Whether the store holds a package of this name, be it whole or damaged."""
    return name in _names()


def list_packages(on_damaged: Callable[[str, ArtifactError], None] | None = None) -> list[Package]:
    """Every whole package of the store, by name; `on_damaged` is told of the others."""
    found: list[Package] = []
    for name in _names():
        try:
            found.append(find_package(name))
        except ArtifactError as error:
            if on_damaged is not None:
                on_damaged(name, error)
    return found


def open_package(folder: Path) -> Package:
    """The package in `folder`, its manifest read and the size of every file checked.

    Raises ArtifactError for anything damaged, naming it and the command that mends it; FileNotFoundError if there is no folder.
    """
    text = _read_manifest(folder)
    try:
        manifest = Manifest.from_json(text, where=str(folder / MANIFEST))
    except ArtifactError as error:
        raise ArtifactError(f"{error}; run `edgespec pull {folder.name} --force`") from error
    mend = _mend(manifest)
    for relative, record in _records(manifest):
        _check_file(folder, relative, record, mend)
    return Package(folder, manifest)


def verify(package: Package, progress: Callable[[int, int], None] | None = None) -> None:
    """Compare every byte with the manifest's sha256. `progress` gets (bytes read, bytes in all). Raises ArtifactError."""
    mend = _mend(package.manifest)
    records = list(package.records())
    total = sum(record.nbytes for _, record in records)
    done = 0
    for relative, record in records:
        _check_file(package.path, relative, record, mend)
        digest = hashlib.sha256()
        with (package.path / relative).open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
        if digest.hexdigest() != record.sha256:
            raise ArtifactError(
                f"{package.path / relative} is damaged: sha256 {digest.hexdigest()[:12]}…, expected {record.sha256[:12]}…; {mend}"
            )


def _looks_like_path(text: str) -> bool:
    return not text.startswith("hf:") and (text.startswith((".", "~")) or "/" in text or "\\" in text)


def _find_installed(name: str) -> Package | None:
    """None if it is not there. A package that is replaced while we read it is read again."""
    target = _package_path(name)
    while True:
        folder = next((f for f in (target, _tmp_path(name) / "old", target) if f.is_dir()), None)
        if folder is None:
            return None
        before = _identity(folder)
        try:
            return open_package(folder)
        except (FileNotFoundError, ArtifactError):
            moved = before is None or _identity(folder) != before
            replaced = folder != target and target.is_dir()  # the old one is being deleted
            if not (moved or replaced):
                raise


def _identity(folder: Path) -> tuple[int, int] | None:
    """Differs if another folder took this one's place. An inode number alone is used again at once by some file systems."""
    try:
        info = folder.stat()
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_ctime_ns


def _open_at(folder: Path) -> Package:
    if folder.is_file():
        raise ArtifactError(f"{folder} is a file, not a package folder; run `edgespec pull {folder}` to convert it")
    if not (folder / MANIFEST).is_file():
        what = "holds no manifest.json" if folder.is_dir() else "does not exist"
        raise ArtifactError(f"{folder} {what}; a model is a name from `edgespec models` or a folder that edgespec converted")
    return open_package(folder)


def _mend(manifest: Manifest) -> str:
    return f"run `edgespec pull {manifest.source.get('pull', manifest.name)} --force`"


def _read_manifest(folder: Path) -> str:
    path, mend = folder / MANIFEST, f"run `edgespec pull {folder.name} --force`"
    info = _plain_file(folder, MANIFEST, mend)
    if info.st_size > _MANIFEST_LIMIT_BYTES:
        raise ArtifactError(f"{path} has {info.st_size} bytes, a manifest has less than {_MANIFEST_LIMIT_BYTES}; {mend}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is not UTF-8 text; {mend}") from error
    except PermissionError as error:
        raise ArtifactError(f"{path} may not be read ({error.strerror}); check who owns it") from error


def _check_file(folder: Path, relative: str, record: FileRecord, mend: str) -> None:
    found = _plain_file(folder, relative, mend).st_size
    if found != record.nbytes:
        raise ArtifactError(f"{folder / relative} is damaged: {found} bytes, expected {record.nbytes}; {mend}")


def _plain_file(folder: Path, relative: str, mend: str) -> os.stat_result:
    """lstat of a file, none of whose steps below `folder` is a symbolic link: a link could lead anywhere."""
    path = folder
    info = folder.stat()
    for part in relative.split("/"):
        path = path / part
        try:
            info = path.lstat()
        except (FileNotFoundError, NotADirectoryError) as error:
            if not folder.is_dir():
                raise FileNotFoundError(folder) from error
            raise ArtifactError(f"{folder / relative} is missing; {mend}") from error
        if stat.S_ISLNK(info.st_mode):
            raise ArtifactError(f"{path} is a symbolic link, packages hold plain files only; {mend}")
    if not stat.S_ISREG(info.st_mode):
        raise ArtifactError(f"{path} is not a plain file; {mend}")
    return info


def _records(manifest: Manifest) -> Iterator[tuple[str, FileRecord]]:
    yield from manifest.files.items()
    for artifact in manifest.artifacts:
        yield from artifact.files.items()


def _names() -> list[str]:
    """Installed names, one caught in the middle of its replacement included."""
    base = home()
    names = {path.name for path in _children(base / "packages") if path.is_dir() and not path.name.startswith(".")}
    return sorted(names | {path.name for path in _children(base / "tmp") if (path / "old").is_dir()})


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _package_path(name: str) -> Path:
    return home() / "packages" / name


def _tmp_path(name: str) -> Path:
    return home() / "tmp" / name


# ---- changing


@contextmanager
def lock(name: str, *, timeout_s: float = 0.0, on_wait: Callable[[str], None] | None = None) -> Generator[None]:
    """Hold `name` against every other process and thread; first put right what a killed one left.

    If it is taken, `on_wait` gets one line and the lock is waited for. Raises ArtifactError after `timeout_s`, or if the store
    cannot be written.
    """
    check_name(name)
    with _writing(home()):
        for folder in ("packages", "sources", "tmp", "locks"):
            (home() / folder).mkdir(parents=True, exist_ok=True)
        # Folded, as "A" and "a" are one folder on many systems.
        guard = filelock.FileLock(home() / "locks" / f"{name.casefold()}.lock", thread_local=False)
        _acquire(guard, name, timeout_s, on_wait)
    try:
        _held.add(name)
        with _writing(home()):
            _recover(name)
        yield
    finally:
        _held.discard(name)
        guard.release()


@contextmanager
def staging(name: str) -> Generator[Path]:
    """An empty folder to write a package in, on the store's own file system; the caller holds `lock(name)`.

    What is not installed by the end is deleted. A full disk inside the block becomes an ArtifactError.
    """
    _check_held(name)
    folder = _tmp_path(name) / "new"
    with _writing(folder):
        folder.mkdir(parents=True)
    try:
        with full_disk(folder):
            yield folder
    finally:
        _delete(_tmp_path(name))


def install(folder: Path, name: str) -> Package:
    """Check the package written in `folder` and rename it to packages/<name>; the caller holds `lock(name)`.

    An older package stays readable until the new one is in place. Raises ArtifactError for an incomplete package; then nothing changed.
    """
    _check_held(name)
    manifest = open_package(folder).manifest
    if manifest.name != name:
        raise ContractError(f"the package in {folder} calls itself {manifest.name!r}, it cannot be installed as {name!r}")
    target, old = _package_path(name), _tmp_path(name) / "old"
    with _writing(target):
        _sync_tree(folder)
        old.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target):
            target.rename(old)
        folder.rename(target)
        _sync_folder(target.parent)
        _delete(old)
    return Package(target, manifest)


def remove(name: str, *, timeout_s: float = 0.0, on_wait: Callable[[str], None] | None = None) -> None:
    """Delete the package `name` from the store; its source stays. Raises ArtifactError if there is none or it is in use."""
    check_name(name)
    if not is_installed(name):  # before the lock, which would make a file for a name that means nothing
        raise ArtifactError(NotInstalled(name, _names()).what)
    with lock(name, timeout_s=timeout_s, on_wait=on_wait):
        target, gone = _package_path(name), _tmp_path(name) / "gone"
        if not os.path.lexists(target):
            raise ArtifactError(NotInstalled(name, _names()).what)
        with _writing(target):
            gone.parent.mkdir(parents=True, exist_ok=True)
            target.rename(gone)  # in one step, so that a killed removal leaves no half package
            _sync_folder(target.parent)
            _delete(gone.parent)


def sweep() -> None:
    """Put right what dead processes left, of every name that nobody holds."""
    for folder in _children(home() / "tmp"):
        with suppress(ArtifactError), lock(folder.name):
            pass


def check_disk(nbytes: int, where: Path, *, what: str = "this") -> None:
    """Raise ArtifactError unless the disk of `where` (which need not exist) has `nbytes` free."""
    place = where.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise ArtifactError(
            f"not enough disk space for {what}: {megabytes(nbytes)} needed, {megabytes(free)} free at {place}; "
            "free some or set EDGESPEC_HOME to a folder on another disk"
        )


def megabytes(nbytes: int) -> str:
    """Bytes as people read them."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _acquire(guard: filelock.BaseFileLock, name: str, timeout_s: float, on_wait: Callable[[str], None] | None) -> None:
    busy = f"another edgespec process is working on {name!r}"
    try:
        guard.acquire(timeout=0)
    except filelock.Timeout:
        if timeout_s > 0:
            if on_wait is not None:
                on_wait(f"{busy}; waiting for it")
            with suppress(filelock.Timeout):
                guard.acquire(timeout=timeout_s, poll_interval=0.1)
    if not guard.is_locked:
        waited = f" (waited {timeout_s:.0f} s)" if timeout_s > 0 else ""
        raise ArtifactError(f"{busy}{waited}; try again when it is done")


def _recover(name: str) -> None:
    """Undo or finish what a killed process began: while we hold the lock, all of tmp/<name> is nobody's."""
    old, target = _tmp_path(name) / "old", _package_path(name)
    if old.is_dir() and not os.path.lexists(target):
        old.rename(target)
    _delete(_tmp_path(name))


def _check_held(name: str) -> None:
    if name not in _held:
        raise ContractError(f"staging and installing {name!r} needs store.lock({name!r}) around it")


@contextmanager
def full_disk(where: Path) -> Generator[None]:
    """Turn "no space left" from inside the block into an ArtifactError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or where
        raise ArtifactError(f"the disk is full: could not write {place}; free some space or set EDGESPEC_HOME to another disk") from error


@contextmanager
def _writing(where: Path) -> Generator[None]:
    """Turn what a full, read-only or forbidden place says into an ArtifactError."""
    try:
        with full_disk(where):
            yield
    except OSError as error:
        place = error.filename or where
        raise ArtifactError(
            f"cannot write {place} ({error.strerror or error}); set EDGESPEC_HOME to a folder that you may write to"
        ) from error


def _sync_tree(folder: Path) -> None:
    """Flush every file and folder below to the disk: a rename must not outlive its contents."""
    for parent, _, files in os.walk(folder):
        for file in files:
            with (Path(parent) / file).open("rb+") as handle:
                os.fsync(handle.fileno())
        _sync_folder(Path(parent))


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # Windows cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(folder: Path) -> None:
    """Best effort: what stays (a file open on Windows) is tried again under the next lock."""
    shutil.rmtree(folder, ignore_errors=True)
