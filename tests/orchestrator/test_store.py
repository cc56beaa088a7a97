from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from edgespec.core.errors import ArtifactError, ContractError
from edgespec.orchestrator import store
from tests.helpers.processes import finish, start
from tests.helpers.stored import write_package


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "store"))
    return tmp_path / "store"


def put(name: str, weights: bytes = b"weights") -> store.Package:
    with store.lock(name), store.staging(name) as folder:
        write_package(folder, name, weights)
        return store.install(folder, name)


def weights_of(package: store.Package) -> bytes:
    return (package.path / "onnx-int8" / "weights.bin").read_bytes()


# ---- finding


def test_home_is_the_environments_choice(home: Path, monkeypatch: pytest.MonkeyPatch):
    assert store.home() == home
    monkeypatch.setenv("EDGESPEC_HOME", "~/models")
    assert store.home() == Path.home() / "models"
    monkeypatch.delenv("EDGESPEC_HOME")
    assert store.home().name == "edgespec"


def test_an_installed_package_is_found_by_name_and_by_path(home: Path):
    put("toy")
    by_name = store.find_package("toy")
    assert by_name.path == home / "packages" / "toy"
    assert store.find_package(str(by_name.path)).manifest == by_name.manifest
    assert store.find_package(by_name.path).manifest == by_name.manifest
    assert [p.name for p in store.list_packages()] == ["toy"]
    store.verify(by_name)


def test_nothing_is_written_by_reading(home: Path):
    assert store.list_packages() == []
    store.sweep()
    with pytest.raises(ArtifactError, match="edgespec pull toy"):
        store.find_package("toy")
    assert not home.exists()


def test_a_missing_model_is_answered_with_what_is_there_and_what_to_run(home: Path):
    put("toy")
    with pytest.raises(ArtifactError, match=r"no model 'other'.*installed: toy.*edgespec pull other"):
        store.find_package("other")
    with pytest.raises(ArtifactError, match="edgespec pull hf:org/repo"):
        store.find_package("hf:org/repo")


@pytest.mark.parametrize("name", ["", "a" * 129, "-x", ".hidden.", "a b", "nul\0", "näme"])
def test_impossible_names_are_refused(home: Path, name: str):
    with pytest.raises(ArtifactError):
        store.find_package(name)
    with pytest.raises(ArtifactError), store.lock(name):
        pass


@pytest.mark.parametrize("name", ["../outside", "/etc", "a/../../b", "..", "a/b", "a\\b"])
def test_names_cannot_leave_the_store(home: Path, name: str):
    for refused in (store.lock(name), store.staging(name)):
        with pytest.raises((ArtifactError, ContractError)), refused:
            pass
    with pytest.raises(ArtifactError):
        store.remove(name)
    with pytest.raises(ArtifactError):
        store.find_package(name)
    assert not home.exists()


def test_a_path_that_is_no_package_says_what_it_is(home: Path, tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArtifactError, match=r"is a file.*edgespec pull"):
        store.find_package(str(tmp_path / "model.gguf"))
    with pytest.raises(ArtifactError, match=r"holds no manifest\.json"):
        store.find_package(str(tmp_path))
    with pytest.raises(ArtifactError, match="does not exist"):
        store.find_package(str(tmp_path / "nowhere"))


# ---- damage


@pytest.mark.parametrize("file", ["tokenizer.json", "onnx-int8/weights.bin"])
def test_a_missing_or_shortened_file_is_named_with_the_command_that_mends_it(home: Path, file: str):
    path = put("toy").path / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=rf"{file} is damaged: .*edgespec pull toy --force"):
        store.find_package("toy")
    path.unlink()
    with pytest.raises(ArtifactError, match=rf"{file} is missing; .*edgespec pull toy --force"):
        store.find_package("toy")


def test_a_changed_byte_is_found_by_verify(home: Path):
    package = put("toy", b"weights")
    (package.path / "onnx-int8" / "weights.bin").write_bytes(b"Weights")
    with pytest.raises(ArtifactError, match=r"weights\.bin is damaged: sha256"):
        store.verify(store.find_package("toy"))


def test_verify_tells_how_far_it_is(home: Path):
    seen: list[tuple[int, int]] = []
    store.verify(put("toy", b"x" * 3_000_000), lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == 3_000_002


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"name": "toy"}', b"[" * 100_000])
def test_a_broken_manifest_is_one_clear_error_and_hides_no_other_package(home: Path, content: bytes):
    put("good")
    (put("toy").path / "manifest.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        store.find_package("toy")
    damaged: list[str] = []
    assert [p.name for p in store.list_packages(lambda name, error: damaged.append(name))] == ["good"]
    assert damaged == ["toy"]


def test_a_huge_manifest_is_not_read(home: Path):
    with (put("toy").path / "manifest.json").open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(ArtifactError, match="a manifest has less than"):
        store.find_package("toy")


@pytest.mark.parametrize("link", ["manifest.json", "tokenizer.json", "onnx-int8"])
def test_symbolic_links_inside_a_package_are_refused(home: Path, tmp_path: Path, link: str):
    path = put("toy").path / link
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"is a symbolic link"):
        store.find_package("toy")


# ---- installing


def test_installing_replaces_and_leaves_no_trace(home: Path):
    put("toy", b"old")
    assert weights_of(put("toy", b"new")) == b"new"
    assert weights_of(store.find_package("toy")) == b"new"
    assert list((home / "tmp").iterdir()) == []


def test_an_incomplete_package_is_not_installed(home: Path):
    put("toy", b"old")
    with store.lock("toy"), store.staging("toy") as folder:
        write_package(folder, "toy", b"new")
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ArtifactError, match=r"tokenizer\.json is missing"):
            store.install(folder, "toy")
    assert weights_of(store.find_package("toy")) == b"old"


def test_what_is_not_installed_is_deleted(home: Path):
    with pytest.raises(RuntimeError), store.lock("toy"), store.staging("toy") as folder:
        write_package(folder, "toy")
        raise RuntimeError("conversion failed")
    assert list((home / "tmp").iterdir()) == []
    assert store.list_packages() == []


def test_staging_and_installing_need_the_lock(home: Path, tmp_path: Path):
    write_package(tmp_path / "toy", "toy")
    with pytest.raises(ContractError, match="lock"), store.staging("toy"):
        pass
    with pytest.raises(ContractError, match="lock"):
        store.install(tmp_path / "toy", "toy")


def test_a_package_goes_by_the_name_in_its_manifest(home: Path):
    with store.lock("toy"), store.staging("toy") as folder:
        write_package(folder, "other")
        with pytest.raises(ContractError, match="'other'"):
            store.install(folder, "toy")


def test_remove(home: Path):
    put("toy")
    put("good")
    store.remove("toy")
    assert [p.name for p in store.list_packages()] == ["good"]
    assert list((home / "tmp").iterdir()) == []
    with pytest.raises(ArtifactError, match="installed: good"):
        store.remove("toy")


_KILLED_WHILE_INSTALLING = """
import os, sys
from pathlib import Path
from edgespec.orchestrator import store
from tests.helpers.stored import write_package
point = int(sys.argv[1])
def dying(function):
    def call(*arguments):
        global point
        point -= 1
        if point < 0:
            os.kill(os.getpid(), 9)
        return function(*arguments)
    return call
Path.rename = dying(Path.rename)
store._sync_folder = dying(store._sync_folder)
store._delete = dying(store._delete)
with store.lock("toy"), store.staging("toy") as folder:
    write_package(folder, "toy", b"new")
    store.install(folder, "toy")
print("done", point)
"""


@pytest.mark.parametrize("present", [False, True])
def test_a_process_killed_at_any_point_of_installing_leaves_the_old_or_the_new_package(home: Path, present: bool):
    deaths = 0
    for point in range(30):
        shutil.rmtree(home, ignore_errors=True)
        if present:
            put("toy", b"old")
        code, out, err = finish(start(_KILLED_WHILE_INSTALLING, str(point)))
        if "done" in out:
            break
        assert code == -9, err
        deaths += 1
        before = weights_of(store.find_package("toy")) if present or (home / "packages" / "toy").exists() else None  # without any repair
        assert before in ((b"old", b"new") if present else (None, b"new"))
        store.sweep()
        after = [weights_of(package) for package in store.list_packages()]
        assert after == ([before] if before else [])
        assert list((home / "tmp").iterdir()) == []
    else:
        pytest.fail("the installation never finished")
    assert deaths >= (7 if present else 6)  # every step was a point of death


def test_a_process_killed_while_converting_leaves_nothing(home: Path):
    code, _, _ = finish(
        start(
            "import os\n"
            "from edgespec.orchestrator import store\n"
            "with store.lock('toy'), store.staging('toy') as folder:\n"
            "    (folder / 'half').write_bytes(b'x')\n"
            "    os.kill(os.getpid(), 9)\n"
        )
    )
    assert code == -9
    assert (home / "tmp" / "toy" / "new" / "half").exists()
    assert store.list_packages() == []
    store.sweep()
    assert list((home / "tmp").iterdir()) == []


def test_a_reader_never_sees_the_package_missing_or_mixed(home: Path):
    put("toy", b"0" * 10)
    stop = threading.Event()
    seen: list[object] = []

    def read() -> None:
        while not stop.is_set():
            try:
                seen.append(len(store.find_package("toy").manifest.artifacts))
            except Exception as error:
                seen.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(1, 60):
        put("toy", b"0" * (10 + i))
    stop.set()
    reader.join()
    assert set(seen) == {1}


# ---- the lock


_HOLDER = """
import sys
from edgespec.orchestrator import store
with store.lock("toy"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_lock_held_elsewhere_is_one_clear_line(home: Path):
    holder = start(_HOLDER)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    lines: list[str] = []
    with pytest.raises(ArtifactError, match="another edgespec process is working on 'toy'; try again"), store.lock("toy"):
        pass
    with pytest.raises(ArtifactError, match=r"waited 0 s"), store.lock("toy", timeout_s=0.2, on_wait=lines.append):
        pass
    assert lines == ["another edgespec process is working on 'toy'; waiting for it"]
    with pytest.raises(ArtifactError, match="another"), store.lock("TOY"):  # one folder on many systems
        pass
    with store.lock("other"):
        pass
    store.sweep()  # passes by what is in use
    finish(holder)


def test_waiting_ends_when_the_holder_dies(home: Path):
    holder = start(_HOLDER)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with store.lock("toy", timeout_s=30.0, on_wait=lambda line: holder.kill()):
        pass
    finish(holder)


def test_threads_of_one_process_exclude_each_other_too(home: Path):
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        with store.lock("toy", timeout_s=30.0):
            inside += 1
            most = max(most, inside)
            threading.Event().wait(0.02)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


# ---- the disk


Usage = namedtuple("Usage", "total used free")


def test_too_little_space_is_said_before_anything_starts(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 5_000_000))
    store.check_disk(5_000_000, home)
    with pytest.raises(ArtifactError, match=r"not enough disk space for toy: 1\.5 GB needed, 5\.0 MB free"):
        store.check_disk(1_500_000_000, home / "not" / "there", what="toy")


def test_a_disk_that_fills_up_while_writing_is_one_clear_error(home: Path):
    put("toy", b"old")
    with pytest.raises(ArtifactError, match="the disk is full"), store.lock("toy"), store.staging("toy"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights.bin")
    assert weights_of(store.find_package("toy")) == b"old"


def test_other_errors_of_a_conversion_stay_what_they_are(home: Path):
    with pytest.raises(PermissionError), store.lock("toy"), store.staging("toy"):
        raise PermissionError(errno.EACCES, "no", "source.gguf")


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file" / "store"))
    with pytest.raises(ArtifactError, match=r"cannot write .*set EDGESPEC_HOME"), store.lock("toy"):
        pass
    assert store.list_packages() == []


def test_a_read_only_store_can_be_read(home: Path, monkeypatch: pytest.MonkeyPatch):
    put("toy")

    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert store.find_package("toy").name == "toy"
    with pytest.raises(ArtifactError, match="cannot write"), store.lock("toy"):
        pass
