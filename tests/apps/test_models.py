from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.core.manifest import Parity
from edgespec_apps.console import progress_bar
from edgespec_converters import pull as pulling
from tests.helpers.stored import write_package
from tests.helpers.tiny import tiny_config, tiny_tensors, write_gguf


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    config = tiny_config("llama")
    return write_gguf(tmp_path / "tiny.gguf", config, tiny_tensors(config))


def put(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / "home" / "packages" / name
    write_package(folder, name)
    return folder


def test_convert_then_use_then_remove(real_command, gguf):
    result = real_command("convert", str(gguf), "--recipe", "float32", "--targets", "onnx,mlx", "--name", "little")
    assert result.code == 0, result.err
    assert "  onnx float32: " in result.out and "argmax agreement 1.000" in result.out
    assert "edgespec chat --model little" in result.err

    listed = json.loads(real_command("models", "--verify", "--json").out)
    assert listed["schema"] == "edgespec.models/1"
    [package] = listed["packages"]
    assert package["name"] == "little"
    assert [a["engine"] for a in package["artifacts"]] == ["onnx", "mlx"]
    assert all(a["parity"]["n"] > 0 for a in package["artifacts"])

    answers = {
        engine: json.loads(real_command("generate", "-m", "little", "--engine", engine, "--json", "--max-tokens", "8", "hello").out)
        for engine in ("onnx", "reference")
    }
    assert answers["onnx"]["token_ids"] == answers["reference"]["token_ids"] != []
    assert answers["reference"]["engine"] == "reference"

    placed = json.loads(real_command("doctor", "--model", "little", "--json").out)
    assert placed["models"] == {"little": ["onnx float32", "mlx float32"]}
    assert placed["model"]["backends"]["onnx"].startswith("onnx float32, ")

    assert real_command("models", "--remove", "little").code == 0
    assert json.loads(real_command("models", "--json").out)["packages"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["/no/such/model.gguf"], 1, "/no/such/model.gguf does not exist"),
        (["smollm3-135m"], 1, "did you mean smollm2-135m?"),
        (["x.gguf", "--targets", "tpu"], 2, "--targets knows onnx and mlx, got tpu"),
    ],
)
@pytest.mark.parametrize("name", ["pull", "convert"])
def test_bad_sources_are_one_line(real_command, name, arguments, code, says):
    result = real_command(name, *arguments)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("edgespec: error: ") and says in result.err
    assert len(result.err.splitlines()) == 1


def test_a_truncated_file_and_an_unknown_recipe_leave_the_store_empty(real_command, gguf):
    assert real_command("convert", str(gguf), "--recipe", "int99").code == 1
    gguf.write_bytes(gguf.read_bytes()[:-1000])
    result = real_command("convert", str(gguf))
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("edgespec: error: ")
    assert json.loads(real_command("models", "--json").out)["packages"] == []


def test_pull_passes_its_options_on(real_command, monkeypatch, tmp_path):
    calls: list[dict] = []
    package = put(tmp_path, "little")

    def pull(spec, *, accept_terms, progress, notify, **options):
        calls.append({"spec": spec, "accepts": accept_terms(None), **options})
        progress("download", 1, 2)
        progress("download", 2, 2)
        notify("a word")
        from edgespec.orchestrator.store import open_package

        return open_package(package)

    monkeypatch.setattr(pulling, "pull", pull)
    result = real_command("pull", "hf:a/b", "--recipe", "int4", "--targets", "mlx", "--force", "--accept-license", "--discard-source")
    assert result.code == 0
    assert calls == [
        {"spec": "hf:a/b", "accepts": True, "name": None, "recipe": "int4", "targets": ("mlx",), "force": True, "discard_source": True}
    ]
    assert result.err.splitlines()[:2] == ["hf:a/b: download", "a word"]


def test_terms_are_not_accepted_in_silence(real_command):
    result = real_command("pull", "gemma3-270m")
    assert result.code == 1
    assert "--accept-license" in result.err


def test_damage_is_named_and_counts_as_failure(real_command, tmp_path):
    put(tmp_path, "whole")
    folder = put(tmp_path, "flipped")
    (folder / "onnx-int8" / "weights.bin").write_bytes(b"wEights")
    (put(tmp_path, "short") / "onnx-int8" / "weights.bin").write_bytes(b"")
    result = real_command("models", "--json")
    assert result.code == 1
    assert [p["name"] for p in json.loads(result.out)["packages"]] == ["flipped", "whole"]
    result = real_command("models", "--verify")
    assert result.code == 1
    assert result.out.splitlines() == ["whole: ok", "short: damaged", "flipped: damaged"]
    assert len([line for line in result.err.splitlines() if line.startswith("edgespec: error: ")]) == 2


def test_a_manifest_that_was_cut_names_the_command_that_mends_it(real_command, tmp_path):
    manifest = put(tmp_path, "cut") / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    result = real_command("models", "--verify")
    assert (result.code, result.out) == (1, "cut: damaged\n")
    assert result.error().endswith("run `edgespec pull cut --force`")


def test_a_second_recipe_is_named_in_the_closing_line_and_a_poor_one_is_told(real_command, tmp_path, monkeypatch):
    from edgespec.orchestrator.store import open_package

    package = open_package(put(tmp_path, "little"))
    [first] = package.manifest.artifacts
    poor = replace(first, recipe="int4", parity=Parity(argmax_agreement=0.71, kl=0.5, max_error=3.0, n=10))
    both = replace(package, manifest=replace(package.manifest, artifacts=(first, poor)))
    monkeypatch.setattr(pulling, "pull", lambda spec, **options: both)
    told = real_command("convert", "little", "--recipe", "int4").err.splitlines()
    assert told[-1] == "Talk with it: edgespec chat --model little@int4"
    assert "likeliest token at 71% of the positions" in told[-2]
    assert real_command("convert", "little", "--recipe", "int8").err == "Talk with it: edgespec chat --model little\n"


def test_models_names_what_can_be_pulled(real_command, tmp_path):
    put(tmp_path, "smollm2-135m")
    out = real_command("models").out
    present, known = out.split("Can be pulled")
    assert "smollm2-135m" in present and "smollm2-135m" not in known
    assert "qwen2.5-coder-1.5b" in known


def test_removing_what_is_not_there(real_command, tmp_path):
    result = real_command("models", "--remove", "ghost")
    assert result.code == 1
    assert "no model 'ghost'" in result.err
    assert not (tmp_path / "home" / "locks").exists()


def test_progress_without_a_terminal_is_a_line_per_stage(capsys):
    with progress_bar("m") as advance:
        for done in range(5):
            advance("download", done, 5)
        advance("check", 1, 1)
    assert capsys.readouterr().err == "m: download\nm: check\n"
