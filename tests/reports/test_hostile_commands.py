"""Hostile files at the front door: `edgespec convert` and `edgespec pull` refuse them in one line, run nothing, leave the store empty."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.orchestrator import store
from tests.helpers.command import edgespec
from tests.helpers.tiny import hf_config, tiny_config, tiny_tensors, write_hf

CONFIG = tiny_config("llama", layers=1)


class Payload:
    """Unpickling this makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def _pickle(folder: Path, name: str) -> Path:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload(folder.parent / "touched")))
    return folder / name


def _configure(folder: Path, **changes: object) -> Path:
    for name in ("evil.py", "modeling_evil.py", "evil"):
        (folder / name).write_text(f"import os; os.mkdir({str(folder.parent / 'touched')!r})")
    (folder / "config.json").write_text(json.dumps(hf_config(CONFIG) | changes))
    return folder


def _truncate(folder: Path) -> Path:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 6)
    return folder


def _gguf(folder: Path, content: bytes) -> Path:
    path = folder.parent / "crafted.gguf"
    path.write_bytes(content)
    return path


HUGE_STRING = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + bytes(150)
MANY_KEYS = b"GGUF" + struct.pack("<IQQ", 3, 0, 10**12) + bytes(150)

CASES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "esb_59_bin": (lambda f: _pickle(f, "pytorch_model.bin"), "pickle"),
    "esb_59_pt": (lambda f: _pickle(f, "model.pt"), "pickle"),
    "esb_59_renamed": (lambda f: _pickle(f, "model.SafeTensors"), "pickle"),
    "esb_59_folder": (lambda f: _pickle(f, "pytorch_model.bin").parent, "pickle"),
    "esb_57_auto_map": (lambda f: _configure(f, auto_map={"AutoModel": "modeling_evil.Evil"}), "never runs code from a model"),
    "esb_57_parent": (lambda f: _configure(f, loader="../evil.py"), "never runs code from a model"),
    "esb_57_absolute": (lambda f: _configure(f, loader="/tmp/evil.py"), "never runs code from a model"),
    "esb_57_trust": (lambda f: _configure(f, trust_remote_code=True), "never runs code from a model"),
    "esb_29_truncated": (_truncate, "model.safetensors is truncated"),
    "esb_55_string": (lambda f: _gguf(f, HUGE_STRING), "crafted.gguf"),
    "esb_55_keys": (lambda f: _gguf(f, MANY_KEYS), "crafted.gguf"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", ["convert", "pull"])
@pytest.mark.parametrize("case", CASES)
def test_hostile_files_are_refused_at_the_door(case: str, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harm, says = CASES[case]
    path = harm(write_hf(tmp_path / "model", CONFIG, tiny_tensors(CONFIG)))
    result = edgespec(verb, str(path), home=tmp_path / "home")
    assert (result.code, result.out) == (1, "")
    assert says in result.error()
    assert not (tmp_path / "touched").exists()
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    assert store.list_packages() == []
    assert list((tmp_path / "home" / "tmp").iterdir()) == []


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--trust"])
def test_esb_57_no_option_lifts_it(flag: str, tmp_path: Path) -> None:
    folder = _configure(write_hf(tmp_path / "model", CONFIG, tiny_tensors(CONFIG)), auto_map={"AutoModel": "evil.Evil"})
    result = edgespec("convert", str(folder), flag, home=tmp_path / "home")
    assert result.code == 2 and flag in result.error()
