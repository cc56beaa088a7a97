"""A manifest is a stranger's file: every field of a wrong type is refused as a damaged package."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Manifest
from edgespec_apps.console import complain
from edgespec_converters.targets import mlx as mlx_target
from tests.helpers.packages import write_package
from tests.helpers.tiny import tiny_checkpoint, tiny_config

WRONG: dict[type, tuple[Any, ...]] = {
    bool: ("x", 0.5, [], None),
    int: ("7", True, 0.5, 1.0, [], {}, None),
    float: ("7", True, [], None),
    str: (5, True, [], {}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    manifest = write_package(mlx_target, tiny_checkpoint(tiny_config("gemma3")), tmp_path_factory.mktemp("package"), "int8")
    data = json.loads(manifest.to_json())
    data["artifacts"][0]["parity"] = {"argmax_agreement": 1.0, "kl": 0.0, "max_error": 0.1, "n": 5}
    data["tokenizer"] |= {"bos_id": 0, "chat_template": "chat_template.jinja"}
    assert json.loads(Manifest.from_json(json.dumps(data)).to_json()) == data
    return data


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, (*path, key))
    elif node is not None:
        yield path, node


def test_a_field_of_a_wrong_type_is_refused(whole: dict[str, Any]) -> None:
    tried = 0
    for path, value in leaves(whole):
        if "sliding" in path:  # read as yes or no, whatever it is
            continue
        for wrong in WRONG[type(value)]:
            if wrong is None and path[-1] in ("bos_id", "chat_template"):
                continue
            damaged = copy.deepcopy(whole)
            place = damaged
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = wrong
            tried += 1
            with pytest.raises(ArtifactError):
                Manifest.from_json(json.dumps(damaged))
    assert tried > 100


@pytest.mark.parametrize("field", ["source", "files", "artifacts", "decoder", "tokenizer"])
@pytest.mark.parametrize("wrong", ["x", 5, None, [1]])
def test_a_field_of_a_wrong_shape_is_refused(whole: dict[str, Any], field: str, wrong: Any) -> None:
    with pytest.raises(ArtifactError):
        Manifest.from_json(json.dumps(whole | {field: wrong}))


@pytest.mark.parametrize("draft", ["../elsewhere", "/tmp/elsewhere", "~", "hf:org/repo", "", 5])
def test_a_draft_is_a_name_in_the_store_and_no_path(whole: dict[str, Any], draft: Any) -> None:
    with pytest.raises(ArtifactError):
        Manifest.from_json(json.dumps(whole | {"draft": draft}))


def test_an_error_that_quotes_a_file_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    complain(f"{Path('a') / chr(27)}[2J\x07 is damaged\nrun something")
    assert capsys.readouterr().err == "edgespec: error: a/\ufffd[2J\ufffd is damaged run something\n"
