"""The tokenizer of a Hugging Face model folder: `tokenizer.json`, or a sentencepiece `tokenizer.model`.

Only files of fixed names are read, and nothing in them is run: a folder that wants its own Python is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import ArtifactError
from edgespec.orchestrator.vocabulary import Vocabulary, open_vocabulary
from edgespec_converters.checkpoint import TokenizerFiles
from edgespec_converters.sources.stop_tokens import find_stop_ids

_USER_DEFINED, _CONTROL = 4, 3  # SentencePiece.Type


@dataclass(frozen=True, slots=True)
class _Added:
    text: str
    special: bool


def hf_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer files of `folder`. Raises ArtifactError if they are missing, damaged or need remote code.

    `tokenizer.json` is kept as it is, save that a token which ends turns is marked special. Tokens that a
    `tokenizer.model` gets from its configuration are added to it.
    """
    config = _json(folder, "tokenizer_config.json")
    model, generation = _json(folder, "config.json"), _json(folder, "generation_config.json")
    if config.get("auto_map"):
        raise ArtifactError(
            f"{folder}: tokenizer_config.json asks for its own Python code (auto_map), which is never run; use another model"
        )
    if (folder / "tokenizer.json").exists():
        kind, added = "tokenizers", dict[int, _Added]()
        content = _within_rows(_read(folder / "tokenizer.json"), model, folder)
    elif (folder / "tokenizer.model").exists():
        kind, content = "sentencepiece", _read(folder / "tokenizer.model")
        added = _configured_tokens(folder, config)
        content = _with_tokens(content, added, folder)
    else:
        raise ArtifactError(f"{folder} has neither tokenizer.json nor tokenizer.model; download the whole model folder")
    vocabulary = open_vocabulary(kind, content)
    size = len(vocabulary.pieces)
    if isinstance(rows := model.get("vocab_size"), int) and size > rows:
        raise ArtifactError(f"{folder} has {size} tokens but config.json says {rows}; the folder mixes files of two models")
    ids = _spellings(vocabulary)
    bos_id = _named_id(config.get("bos_token"), ids)
    if bos_id is None:
        bos_id = next(iter(_id_list(model, "bos_token_id", size, folder)), None)
    eos_id = _named_id(config.get("eos_token"), ids)
    named = [eos_id, *_id_list(generation, "eos_token_id", size, folder), *_id_list(model, "eos_token_id", size, folder)]
    template = _chat_template(folder, config)
    stop_ids = find_stop_ids(
        named,
        added=_outside_text(kind, content, vocabulary, added),
        control=vocabulary.control_ids,
        chat_template=template,
        bos_token=_token_text(config.get("bos_token")) or "",
        eos_token=_token_text(config.get("eos_token")) or "",
    )
    ordinary = sorted({*stop_ids, *([] if bos_id is None else [bos_id])} - vocabulary.control_ids)
    if ordinary:
        content = _marked_special(kind, content, ordinary)
    return TokenizerFiles(
        kind=kind,
        content=content,
        vocab_size=size,
        add_bos=bos_id is not None and bool(config.get("add_bos_token", _adds_bos(kind, content, bos_id))),
        bos_id=bos_id,
        stop_ids=stop_ids,
        chat_template=template,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}); download the model folder again") from error


def _json(folder: Path, name: str) -> Mapping[str, Any]:
    """A configuration file of the folder; empty if there is none."""
    path = folder / name
    if not path.exists():
        return {}
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({type(error).__name__}); download the model folder again") from error
    if not isinstance(data, dict):
        raise ArtifactError(f"{path} holds {type(data).__name__} instead of an object; download the model folder again")
    return data


def _token_text(token: Any) -> str | None:
    """Special tokens are written as text or as {"content": text, …}."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _spellings(vocabulary: Vocabulary) -> dict[str, int]:
    """Spelling → id, control tokens before others that read the same."""
    order = [*(i for i in range(len(vocabulary.pieces)) if i not in vocabulary.control_ids), *sorted(vocabulary.control_ids, reverse=True)]
    return {vocabulary.pieces[i].decode("utf-8", errors="replace"): i for i in order if vocabulary.pieces[i]}


def _named_id(token: Any, ids: Mapping[str, int]) -> int | None:
    text = _token_text(token)
    return None if text is None else ids.get(text)


def _id_list(config: Mapping[str, Any], key: str, size: int, folder: Path) -> list[int]:
    value = config.get(key)
    values: Iterable[Any] = [] if value is None else value if isinstance(value, list) else [value]
    found = list(values)
    if bad := [v for v in found if not isinstance(v, int) or isinstance(v, bool) or not 0 <= v < size]:
        raise ArtifactError(f"{folder}: {key} is {bad[0]!r}, outside the tokenizer's {size} ids; the folder mixes files of two models")
    return found


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read(path).decode("utf-8", errors="replace")
    template = config.get("chat_template")
    if isinstance(template, list):
        templates = {t["name"]: t["template"] for t in template if isinstance(t, dict) and {"name", "template"} <= t.keys()}
        template = templates.get("default", next(iter(templates.values()), None))
    return template if isinstance(template, str) and template.strip() else None


def _configured_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, _Added]:
    """Tokens that stand in the configuration beside a sentencepiece model."""
    try:
        added = {
            int(i): _Added(token["content"], bool(token.get("special"))) for i, token in config.get("added_tokens_decoder", {}).items()
        }
        if not added:
            added = {int(i): _Added(text, True) for text, i in _json(folder, "added_tokens.json").items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(f"{folder}: the list of added tokens is damaged ({error}); download the model folder again") from error
    return added


def _within_rows(content: bytes, model: Mapping[str, Any], folder: Path) -> bytes:
    """The tokenizer without added tokens that the embedding has no rows for: text models share a file with their image siblings."""
    rows: object = model.get("vocab_size")
    try:
        data = json.loads(content)
        added = {token["id"]: token for token in data["added_tokens"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{folder / 'tokenizer.json'} is damaged ({type(error).__name__}); download the model folder again") from error
    if not isinstance(rows, int) or all(i < rows for i in added):
        return content
    data["added_tokens"] = [token for i, token in added.items() if i < rows]
    vocab: object = data.get("model", {}).get("vocab")
    if isinstance(vocab, dict):
        data["model"]["vocab"] = {text: i for text, i in vocab.items() if i < rows or i not in added}
    return json.dumps(data, ensure_ascii=False).encode()


def _with_tokens(content: bytes, added: Mapping[int, _Added], folder: Path) -> bytes:
    """The sentencepiece model with configured tokens appended, and the special ones of its own marked as control."""
    model = _model_proto(content)
    for i, token in sorted(added.items()):
        if i == len(model.pieces):
            model.pieces.add(piece=token.text, score=0.0, type=_CONTROL if token.special else _USER_DEFINED)
        elif not 0 <= i < len(model.pieces):
            raise ArtifactError(f"{folder}: added token {token.text!r} has id {i} but there are only {len(model.pieces)} tokens before it")
        elif token.special and model.pieces[i].type in (1, _USER_DEFINED):
            model.pieces[i].type = _CONTROL
    return model.SerializeToString() if added else content


def _outside_text(kind: str, content: bytes, vocabulary: Vocabulary, added: Mapping[int, _Added]) -> dict[str, int]:
    """Spelling → id of every token that is matched apart from ordinary text."""
    found = {vocabulary.pieces[i].decode("utf-8", errors="replace"): i for i in vocabulary.control_ids}
    if kind == "tokenizers":
        return found | {token["content"]: token["id"] for token in json.loads(content).get("added_tokens", [])}
    return found | {token.text: i for i, token in added.items()}


def _marked_special(kind: str, content: bytes, ids: Iterable[int]) -> bytes:
    """The file with `ids` as control tokens, so that no user text can spell them."""
    if kind == "sentencepiece":
        model = _model_proto(content)
        for i in ids:
            model.pieces[i].type = _CONTROL
        return model.SerializeToString()
    data = json.loads(content)
    listed = {token["id"]: token for token in data.get("added_tokens", [])}
    for i in ids:
        if i in listed:
            listed[i]["special"] = True
    return json.dumps(data, ensure_ascii=False).encode()


def _model_proto(content: bytes) -> Any:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    pb: Any = sentencepiece_model_pb2
    model = pb.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise ArtifactError("tokenizer.model is not a sentencepiece model; download the model folder again") from error
    return model


def _adds_bos(kind: str, content: bytes, bos_id: int | None) -> bool:
    """What the folder's tokenizer does when its configuration does not say. Sentencepiece ones are trained with BOS."""
    if kind == "sentencepiece":
        return True
    from tokenizers import Tokenizer

    return Tokenizer.from_buffer(content).encode("a").ids[:1] == [bos_id]
