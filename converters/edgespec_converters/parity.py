"""Is the converted model still the model? Its logits against those of the float32 checkpoint, teacher-forced on fixed texts.

What this does not see: long contexts, and errors that only tokens outside `parity.txt` wake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from edgespec.backends.reference import embed, layer, norm, softmax
from edgespec.core.decoder import DecoderConfig
from edgespec.core.engine import Engine, TokenBatch
from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Parity
from edgespec.core.scores import Float32, Float64, Int32
from edgespec.orchestrator.text import Tokenizer
from edgespec_converters.recipes import Gate

WARM_UP = 4  # rows not compared: after so few tokens the law is flat and its argmax says nothing
_MOST_TOKENS = 48  # per text
_TEXTS = Path(__file__).parent / "parity.txt"


def texts() -> list[str]:
    """Prose, code, data and several languages."""
    return [text.strip("\n") for text in _TEXTS.read_text(encoding="utf-8").split("====\n")]


def token_sequences(tokenizer: Tokenizer) -> list[Int32]:
    """The texts as token ids, each cut to the same length."""
    encoded = (tokenizer.encode(text, bos=True)[:_MOST_TOKENS] for text in texts())
    return [np.array(ids, np.int32) for ids in encoded if len(ids) > WARM_UP]


def streamed_logits(
    config: DecoderConfig,
    tensor: Callable[[str], Float32],
    sequences: Sequence[Int32],
    *,
    vocab_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Float32]:
    """float32 [rows, V] per sequence: the rows after `WARM_UP`, from weights of which one layer at a time is in memory.

    The maths is the reference engine's, for all positions at once. `progress` gets (layers done, layers in all).
    """
    lengths = [len(ids) for ids in sequences]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    x = embed(config, tensor("model.embed_tokens.weight"), np.concatenate(sequences))
    for index in range(config.layers):
        names = [name for name in config.shapes() if name.startswith(f"model.layers.{index}.")]
        x = layer(config, index, {name: tensor(name) for name in names}, x, positions, _causal(config, index, lengths), _product)
        progress(index + 1, config.layers)
    hidden = norm(config, tensor("model.norm.weight"), x)
    head = tensor("model.embed_tokens.weight" if config.tied else "lm_head.weight")[:vocab_size]
    return [_product(head, part[WARM_UP:]) for part in _parts(hidden, lengths)]


def engine_logits(engine: Engine, sequences: Sequence[Int32]) -> Iterator[list[Float32]]:
    """The same rows from an engine, one sequence after the other."""
    for ids in sequences:
        batch = TokenBatch.chain(ids, scored=len(ids) - WARM_UP)
        logits = engine.forward([(batch, engine.new_cache(len(ids)))])[0].logits
        yield [logits.row(i) for i in range(len(logits))]


def compare(expected: Sequence[Float32], actual: Iterator[Sequence[Float32]] | Sequence[Float32]) -> Parity:
    """Argmax agreement, mean KL(expected || actual) in nats and the greatest difference of logits, over all rows."""
    agreed = n = 0
    kl = worst = 0.0
    for expected_rows, actual_rows in zip(expected, actual, strict=True):
        for p, q in zip(expected_rows, actual_rows, strict=True):
            agreed += int(p.argmax()) == int(q.argmax())
            worst = max(worst, float(np.abs(p - q).max()))
            log_p, log_q = _log_softmax(p), _log_softmax(q)
            kl += float(np.exp(log_p) @ (log_p - log_q))
            n += 1
    return Parity(argmax_agreement=agreed / n, kl=kl / n, max_error=worst, n=n)


def check_gate(parity: Parity, gate: Gate, what: str) -> None:
    """Raise ArtifactError if `parity` misses what the recipe demands; numbers that are not numbers miss everything."""
    if parity.argmax_agreement >= gate.argmax_agreement and parity.kl <= gate.kl:
        return
    raise ArtifactError(
        f"{what} strays too far from its source: argmax agreement {parity.argmax_agreement:.3f} (at least {gate.argmax_agreement:g}), "
        f"KL {parity.kl:.4f} nats (at most {gate.kl:g}) on {parity.n} positions; "
        "choose a recipe with more bits, or write one with a lower gate"
    )


def _product(weight: Float32, x: Float32) -> Float32:
    return x @ weight.T


def _causal(config: DecoderConfig, index: int, lengths: Sequence[int]) -> Callable[[Float32, Float32, Float32], Float32]:
    """Attention of every sequence over itself alone."""
    window = config.window(index)

    def attend(q: Float32, k: Float32, v: Float32) -> Float32:
        each = zip(_parts(q, lengths), _parts(k, lengths), _parts(v, lengths), strict=True)
        return np.concatenate([_attend(*qkv, window, config.scale) for qkv in each])

    return attend


def _attend(q: Float32, k: Float32, v: Float32, window: int | None, scale: float) -> Float32:
    """q [n, H, D], k and v [n, KV, D] -> [n, H, D]."""
    n, heads, _ = q.shape
    kv_heads = k.shape[1]
    distance = np.arange(n)[:, None] - np.arange(n)
    unseen = (distance < 0) | (distance >= (n if window is None else window))
    grouped = q.reshape(n, kv_heads, heads // kv_heads, -1).transpose(1, 2, 0, 3)  # [KV, H/KV, n, D]
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * np.float32(scale)  # [KV, H/KV, n, n]
    weights = softmax(np.where(unseen, np.float32(-np.inf), scores))
    return (weights @ v.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(q.shape)


def _parts(rows: Float32, lengths: Sequence[int]) -> list[Float32]:
    return np.split(rows, np.cumsum(lengths)[:-1])


def _log_softmax(logits: Float32) -> Float64:
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())
