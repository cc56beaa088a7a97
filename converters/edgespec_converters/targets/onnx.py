"""Checkpoint + recipe → ONNX graph for ONNX Runtime's CPU kernels: integer matmuls, grouped-query attention with in-place KV.

model.onnx   the graph, norms and other small constants
model.data   everything else, at page-aligned offsets, written tensor by tensor so that no more than one tensor is in memory

Inputs (B = 1 sequence, S rows, R scored rows, C = KV capacity; the extra row of attention included):
  input_ids int32 [B, S]; rows int64 [R], the rows that get logits; position_ids int64 [B, S + 1]; query_seqlens int32 [B] = S + 1;
  seqlens_k int32 [B], tokens in the KV after this pass, less 1; total_sequence_length int32 [1] = C;
  bias float32 [1, 1, S + 1, C], added to q·k; cos and sin float32 [C, head_dim / 2] by position; window_bias, window_cos and
  window_sin likewise for sliding layers, whose window lies in the bias: the operator's own counts rows, which in a tree are no
  positions;
  past_key.i, past_value.i float32 [B, kv heads, C, head_dim].
Outputs: logits float32 [R, V]; features float32 [B, S, D], the hidden state before the final norm; present_key.i and present_value.i,
to be bound to the same memory as past_key.i and past_value.i.

Attention runs with one extra zero row behind the real ones, because its kernel takes another path for a single row than for
several: with it a row's result has the same bits however many rows are scored together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Artifact, FileRecord
from edgespec.core.scores import Float32
from edgespec_converters.checkpoint import Checkpoint
from edgespec_converters.quantize import Quantized, UInt8, quantize_tensor
from edgespec_converters.recipes import FLOAT, Recipe, fit

ENGINE = "onnx"
GRAPH_FILE = "model.onnx"
DATA_FILE = "model.data"
GRAPH_LIMIT_BYTES = (1 << 31) - 1  # protobuf's own; a test lowers it
BLOCKS = (16, 32, 64, 128, 256)  # what the integer matmul kernels take
INVARIANT = frozenset({(4, 16), (4, 32), (8, 16), (8, 32), (8, 64)})  # (bits, block) verified bit for bit over row counts
INVARIANT_HEAD_DIM = 128  # longer products q·k are summed in another order once 64 tokens are attended to
HEAD_PART_BYTES = 32 << 20

_INLINE_BYTES = 1024  # smaller constants stay in the graph
_PAGE_BYTES = 4096
_OPSET, _IR = 21, 10
_MS = "com.microsoft"
_FUSED_ROTATION_MULTIPLE = 16  # head sizes that GroupQueryAttention rotates itself
_INT8_ACCUMULATION = 4  # accuracy_level: activations are quantised to 8 bits per block; anything else is several times slower

Progress = Callable[[int, int], None]  # (tensors done, tensors in all)


def write(checkpoint: Checkpoint, recipe: Recipe, folder: Path, *, vocab_size: int, progress: Progress | None = None) -> Artifact:
    """Write `model.onnx` and `model.data` into `folder` (created) and describe them; parity is left to the caller.

    Embedding and head keep their first `vocab_size` rows. ArtifactError for weights that are not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _DataFile(folder / DATA_FILE) as data:
        writer = _Decoder(checkpoint, recipe, data, vocab_size, progress or (lambda done, total: None))
        model = writer.build()
    graph = model.SerializeToString()
    if len(graph) > GRAPH_LIMIT_BYTES:
        raise ArtifactError(f"the graph of {checkpoint.name} takes {len(graph)} bytes, more than the {GRAPH_LIMIT_BYTES} that ONNX allows")
    (folder / GRAPH_FILE).write_bytes(graph)
    files = {
        f"{folder.name}/{GRAPH_FILE}": FileRecord(sha256=hashlib.sha256(graph).hexdigest(), nbytes=len(graph)),
        f"{folder.name}/{DATA_FILE}": FileRecord(sha256=data.sha256(), nbytes=data.nbytes),
    }
    return Artifact(
        engine=ENGINE,
        recipe=recipe.name,
        folder=folder.name,
        files=files,
        weight_bytes=writer.read_bytes,
        bits_per_weight=8 * sum(f.nbytes for f in files.values()) / writer.weights,
        width_invariant=writer.formats <= INVARIANT and checkpoint.config.head_dim <= INVARIANT_HEAD_DIM,
        exceptions=writer.exceptions,
    )


class _DataFile:
    """The external data file: arrays one behind the other at page-aligned offsets, hashed as they go."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.nbytes = 0
        self._hash = hashlib.sha256()
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def append(self, array: NDArray[Any]) -> int:
        """The offset at which `array` now lies."""
        self._put(b"\0" * (-self.nbytes % _PAGE_BYTES))
        offset = self.nbytes
        self._put(np.ascontiguousarray(array).data.cast("B"))
        return offset

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def _put(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._hash.update(content)
        self.nbytes += len(content)


class _Graph:
    """Nodes and constants of an ONNX graph under construction. Values are known by name."""

    def __init__(self, data: _DataFile) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self._data = data
        self._offsets: dict[str, int] = {}

    def node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any) -> str:
        """Add an operator; its first output."""
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """Add a constant, in the data file if it is not tiny."""
        if name in self.constants:
            return name
        if array.nbytes <= _INLINE_BYTES:
            self.constants[name] = onnx.numpy_helper.from_array(array, name)
            return name
        self._offsets[name] = self._data.append(array)
        return self._external(name, array.shape, array.dtype)

    def view(self, name: str, source: str, shape: tuple[int, ...], *, skip_rows: int = 0) -> str:
        """Add a constant of `shape` that shares the stored bytes of `source` from row `skip_rows` on."""
        held = self.constants[source]
        if source not in self._offsets:
            whole = onnx.numpy_helper.to_array(held)
            return self.constant(name, whole[skip_rows:].reshape(-1)[: math.prod(shape)].reshape(shape))
        dtype = helper.tensor_dtype_to_np_dtype(held.data_type)
        self._offsets[name] = self._offsets[source] + skip_rows * math.prod(held.dims[1:]) * dtype.itemsize
        return self._external(name, shape, dtype)

    def _external(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(dtype), dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        length = math.prod(shape) * dtype.itemsize
        for key, value in (("location", self._data.name), ("offset", self._offsets[name]), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.constants[name] = tensor
        return name


class _Decoder:
    """Builds the graph of a DecoderConfig. Also counts what the artifact reports."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, data: _DataFile, vocab_size: int, progress: Progress) -> None:
        self.exceptions: dict[str, str] = {}
        self.formats: set[tuple[int, int]] = set()  # (bits, block) of every matmul
        self.read_bytes = 0
        self._checkpoint, self._recipe, self._vocab_size, self._progress = checkpoint, recipe, vocab_size, progress
        self._config = checkpoint.config
        self._shapes = self._config.shapes()
        self.weights = sum(math.prod(shape) for shape in self._shapes.values())
        self._done = 0
        self._graph = _Graph(data)

    def build(self) -> onnx.ModelProto:
        c, g = self._config, self._graph
        hidden = self._embed()
        normed = self._norm("model.layers.0.input_layernorm.weight", hidden)
        for layer in range(c.layers):
            following = f"model.layers.{layer + 1}.input_layernorm.weight" if layer + 1 < c.layers else "model.norm.weight"
            normed, hidden = self._layer(layer, normed, hidden, following, "features" if layer + 1 == c.layers else f"hidden.{layer}")
        flat = g.node("Squeeze", [normed, g.constant("axis.0", np.zeros(1, np.int64))], ["final.flat"])
        self._head(g.node("Gather", [flat, "rows"], ["final.scored"], axis=0))
        graph = helper.make_graph(g.nodes, "decoder", self._inputs(), self._outputs(), list(g.constants.values()))
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_MS, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR, producer_name="edgespec")

    # -- the decoder ----------------------------------------------------------------------------------------------

    def _embed(self) -> str:
        g, name = self._graph, "model.embed_tokens.weight"
        weight = self._weight(name, rows=self._vocab_size)
        if isinstance(weight, Quantized):
            codes, scales, *zeros = _store(g, name, weight)
            table = g.view(f"{name}.table", codes, (self._vocab_size, weight.codes.shape[1] * weight.bits // 8))
            attributes = {"bits": weight.bits, "block_size": weight.block, "gather_axis": 0, "quantize_axis": 1}
            hidden = g.node("GatherBlockQuantized", [table, "input_ids", scales, *zeros], ["embed"], domain=_MS, **attributes)
        else:
            hidden = g.node("Gather", [g.constant(name, weight), "input_ids"], ["embed"], axis=0)
        if self._config.tied:
            self._tied = weight
        if self._config.embed_scale != 1.0:
            hidden = g.node("Mul", [hidden, g.constant("embed.scale", np.array(self._config.embed_scale, np.float32))], ["embed.scaled"])
        return hidden

    def _layer(self, layer: int, normed: str, hidden: str, following: str, out: str) -> tuple[str, str]:
        """The next layer's normed input, and the residual stream by the name `out`."""
        c, p = self._config, f"model.layers.{layer}."
        attention = self._attention(layer, normed)
        if c.post_norms:
            attention = self._norm(p + "post_attention_layernorm.weight", attention)
        before_mlp = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
        normed, hidden = self._add_norm(f"{p}{before_mlp}.weight", attention, hidden, p + "hidden")
        mlp = self._mlp(p, normed)
        if c.post_norms:
            mlp = self._norm(p + "post_feedforward_layernorm.weight", mlp)
        return self._add_norm(following, mlp, hidden, out)

    def _attention(self, layer: int, normed: str) -> str:
        c, g, p = self._config, self._graph, f"model.layers.{layer}.self_attn."
        widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        packed = self._project([f"{p}{x}_proj.weight" for x in "qkv"], normed, f"{p}qkv")
        padded = g.node("Pad", [packed, g.constant("one_row", np.array([0, 0, 0, 0, 1, 0], np.int64))], [p + "padded"])
        parts = [f"{p}{x}" for x in "qkv"]
        g.node("Split", [padded, g.constant("qkv.widths", np.array(widths, np.int64))], parts, axis=2)
        if c.qk_norm:
            parts[0] = self._head_norm(p + "q_norm.weight", parts[0], c.heads)
            parts[1] = self._head_norm(p + "k_norm.weight", parts[1], c.kv_heads)
        mixed = self._mix(layer, parts, p)
        first, last, axis = (g.constant(f"slice.{n}", np.array([n], np.int64)) for n in (0, -1, 1))
        real = g.node("Slice", [mixed, first, last, axis], [p + "real"])
        return self._project([p + "o_proj.weight"], real, p + "o")

    def _mix(self, layer: int, qkv: list[str], p: str) -> str:
        """Rotate q and k, append k and v to the cache, attend."""
        c, g = self._config, self._graph
        kind = _kind(c.window(layer))
        cos, sin = f"{kind}cos", f"{kind}sin"
        rotation = [cos, sin, "position_ids"]
        if c.head_dim % _FUSED_ROTATION_MULTIPLE:
            for i, heads in ((0, c.heads), (1, c.kv_heads)):
                inputs = [qkv[i], "position_ids", cos, sin]
                qkv[i] = g.node("RotaryEmbedding", inputs, [f"{qkv[i]}.rotated"], domain=_MS, num_heads=heads)
            rotation = ["", "", ""]
        inputs = [*qkv, f"past_key.{layer}", f"past_value.{layer}", "seqlens_k", "total_sequence_length", *rotation, f"{kind}bias"]
        inputs += [""] * 5 + ["query_seqlens"]  # no sinks, no scales of a quantised cache, no norms
        outputs = [p + "mixed", f"present_key.{layer}", f"present_value.{layer}"]
        attributes = {"num_heads": c.heads, "kv_num_heads": c.kv_heads, "scale": c.scale, "do_rotary": int(rotation[0] != "")}
        return g.node("GroupQueryAttention", inputs, outputs, domain=_MS, **attributes)

    def _mlp(self, p: str, normed: str) -> str:
        c, g = self._config, self._graph
        gate = self._project([p + "mlp.gate_proj.weight"], normed, p + "mlp.gate")
        up = self._project([p + "mlp.up_proj.weight"], normed, p + "mlp.up")
        if c.activation == "silu":
            active = g.node("QuickGelu", [gate], [p + "mlp.active"], domain=_MS, alpha=1.0)
        else:
            active = g.node("Gelu", [gate], [p + "mlp.active"], approximate="tanh")
        return self._project([p + "mlp.down_proj.weight"], g.node("Mul", [active, up], [p + "mlp.gated"]), p + "mlp.down")

    def _head(self, scored: str) -> None:
        g, name = self._graph, "lm_head.weight"
        if self._config.tied:
            name, weight = "model.embed_tokens.weight", self._tied
        else:
            weight = self._weight(name, rows=self._vocab_size)
        if isinstance(weight, Quantized):
            self._integer_head(name, weight, scored)
        else:
            self.formats.add((32, 0))
            self.read_bytes += weight.nbytes
            g.node("Gemm", [scored, g.constant(name, weight)], ["logits"], transB=1)

    def _integer_head(self, name: str, weight: Quantized, scored: str) -> None:
        """In parts: while the library repacks a matrix at load time, it is in memory twice."""
        g, rows = self._graph, len(weight.codes)
        pages = max(1, HEAD_PART_BYTES * 8 // (weight.codes.shape[1] * weight.bits) // _PAGE_BYTES)
        step = pages * _PAGE_BYTES  # rows; keeps every part page-aligned
        if rows <= step:
            self._integer_matmul(name, weight, scored, "logits")
            return
        self._account(weight)
        stored = _store(g, name, weight)
        parts: list[str] = []
        for start in range(0, rows, step):
            n = min(step, rows - start)
            views = [g.view(f"{x}.{start}", x, (n, *g.constants[x].dims[1:]), skip_rows=start) for x in stored]
            parts.append(self._multiply(views, weight, n, scored, f"logits.{start}"))
        g.node("Concat", parts, ["logits"], axis=-1)

    # -- building blocks ------------------------------------------------------------------------------------------

    def _project(self, names: list[str], x: str, out: str) -> str:
        """x · Wᵀ + bias for one matrix or several stacked; one matmul if their formats agree."""
        g = self._graph
        weights = [self._weight(name) for name in names]
        biases = [self._vector(b) for name in names if (b := name.removesuffix("weight") + "bias") in self._shapes]
        if len({_layout(weight) for weight in weights}) > 1:
            parts = [self._matmul(name, weight, None, x, f"{out}.{i}") for i, (name, weight) in enumerate(zip(names, weights, strict=True))]
            stacked = g.node("Concat", parts, [f"{out}.stacked"], axis=-1)
            return g.node("Add", [stacked, g.constant(f"{out}.bias", np.concatenate(biases))], [out]) if biases else stacked
        bias = g.constant(f"{out}.bias", np.concatenate(biases)) if biases else None
        return self._matmul(f"{out}.weight", _stack(weights), bias, x, out)

    def _matmul(self, name: str, weight: Quantized | Float32, bias: str | None, x: str, out: str) -> str:
        if isinstance(weight, Quantized):
            return self._integer_matmul(name, weight, x, out, bias)
        self.formats.add((32, 0))
        self.read_bytes += weight.nbytes
        product = self._graph.node("MatMul", [x, self._graph.constant(name, weight.T)], [out if bias is None else f"{out}.product"])
        return product if bias is None else self._graph.node("Add", [product, bias], [out])

    def _integer_matmul(self, name: str, weight: Quantized, x: str, out: str, bias: str | None = None) -> str:
        self._account(weight)
        return self._multiply(_store(self._graph, name, weight), weight, len(weight.codes), x, out, bias)

    def _account(self, weight: Quantized) -> None:
        self.formats.add((weight.bits, weight.block))
        self.read_bytes += weight.nbytes

    def _multiply(self, stored: list[str], weight: Quantized, rows: int, x: str, out: str, bias: str | None = None) -> str:
        """x · Wᵀ + bias, where `stored` names codes, scales and perhaps zeros of `rows` rows in the format of `weight`."""
        codes, scales, *zeros = stored
        columns = weight.codes.shape[1]
        attributes = {"K": columns, "N": rows, "bits": weight.bits, "block_size": weight.block, "accuracy_level": _INT8_ACCUMULATION}
        optional = [zeros[0] if zeros else "", "", bias or ""]
        while optional and not optional[-1]:
            optional.pop()
        return self._graph.node("MatMulNBits", [x, codes, scales, *optional], [out], domain=_MS, **attributes)

    def _norm(self, name: str, x: str) -> str:
        return self._graph.node(
            "SimplifiedLayerNormalization", [x, self._norm_weight(name)], [f"{name}.out"], axis=-1, epsilon=self._config.norm_eps
        )

    def _add_norm(self, name: str, x: str, residual: str, out: str) -> tuple[str, str]:
        """norm(x + residual), and x + residual by the name `out`."""
        outputs = [f"{name}.out", "", "", out]
        inputs = [x, residual, self._norm_weight(name)]
        self._graph.node("SkipSimplifiedLayerNormalization", inputs, outputs, domain=_MS, epsilon=self._config.norm_eps)
        return outputs[0], outputs[3]

    def _head_norm(self, name: str, x: str, heads: int) -> str:
        """Norm over each head's values: x [B, S, heads · head_dim]."""
        g, c = self._graph, self._config
        split = g.constant(f"heads.{heads}", np.array([0, 0, heads, c.head_dim], np.int64))
        joined = g.constant(f"heads.{heads}.joined", np.array([0, 0, heads * c.head_dim], np.int64))
        normed = self._norm(name, g.node("Reshape", [x, split], [f"{name}.split"]))
        return g.node("Reshape", [normed, joined], [f"{name}.joined"])

    def _norm_weight(self, name: str) -> str:
        return self._graph.constant(name, self._vector(name) + np.float32(self._config.norm_offset))

    # -- reading the checkpoint -----------------------------------------------------------------------------------

    def _weight(self, name: str, rows: int | None = None) -> Quantized | Float32:
        """A matrix [N, K] in the nearest format to the recipe's that the kernels know; its first `rows` rows."""
        shape = self._shapes[name]
        wanted = self._recipe.format_for(name, shape)
        format, why = fit(wanted, shape[1], blocks=BLOCKS)
        if format.bits == 16:
            format, why = FLOAT, "float32 (no float16 kernels on this engine)"
        if why:
            self.exceptions[name] = why
        self._step()
        if format.quantized:
            return _first(quantize_tensor(self._checkpoint, name, format), rows)
        return self._checkpoint.tensor(name)[:rows]

    def _vector(self, name: str) -> Float32:
        self._step()
        return self._checkpoint.tensor(name)

    def _step(self) -> None:
        self._done += 1
        self._progress(self._done, len(self._shapes))

    # -- the graph's ends -----------------------------------------------------------------------------------------

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        value = helper.make_tensor_value_info
        c = self._config
        inputs = [
            value("input_ids", TensorProto.INT32, ["B", "S"]),
            value("rows", TensorProto.INT64, ["R"]),
            value("position_ids", TensorProto.INT64, ["B", "S + 1"]),
            value("query_seqlens", TensorProto.INT32, ["B"]),
            value("seqlens_k", TensorProto.INT32, ["B"]),
            value("total_sequence_length", TensorProto.INT32, [1]),
        ]
        for kind in sorted({_kind(c.window(layer)) for layer in range(c.layers)}):
            inputs.append(value(f"{kind}bias", TensorProto.FLOAT, [1, 1, "S + 1", "C"]))
            inputs += [value(f"{kind}{table}", TensorProto.FLOAT, ["C", c.head_dim // 2]) for table in ("cos", "sin")]
        return inputs + self._kv("past")

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        value = helper.make_tensor_value_info
        logits = value("logits", TensorProto.FLOAT, ["R", self._vocab_size])
        return [logits, value("features", TensorProto.FLOAT, ["B", "S", self._config.hidden]), *self._kv("present")]

    def _kv(self, when: str) -> list[onnx.ValueInfoProto]:
        c = self._config
        names = [f"{when}_{part}.{layer}" for layer in range(c.layers) for part in ("key", "value")]
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", c.kv_heads, "C", c.head_dim]) for name in names]


def _kind(window: int | None) -> str:
    """What the inputs of a layer with this window begin with."""
    return "" if window is None else "window_"


def _layout(weight: Quantized | Float32) -> tuple[int, int, bool]:
    return (weight.bits, weight.block, weight.zeros is None) if isinstance(weight, Quantized) else (32, 0, True)


def _stack(weights: Sequence[Quantized | Float32]) -> Quantized | Float32:
    """Matrices of one layout, one below the other."""
    if len(weights) == 1:
        return weights[0]
    quantized = [weight for weight in weights if isinstance(weight, Quantized)]
    if not quantized:
        return np.concatenate([weight for weight in weights if not isinstance(weight, Quantized)])
    zeros = [weight.zeros for weight in quantized if weight.zeros is not None]
    return Quantized(
        np.concatenate([weight.codes for weight in quantized]),
        np.concatenate([weight.scales for weight in quantized]),
        np.concatenate(zeros) if zeros else None,
        quantized[0].bits,
    )


def _first(weight: Quantized, rows: int | None) -> Quantized:
    return Quantized(weight.codes[:rows], weight.scales[:rows], None if weight.zeros is None else weight.zeros[:rows], weight.bits)


def _store(graph: _Graph, name: str, weight: Quantized) -> list[str]:
    """Constants of a quantised matrix as MatMulNBits reads them: codes [N, K / block, bytes per block], scales, zeros if any."""
    if f"{name}.codes" in graph.constants:
        return [f"{name}.{part}" for part in ("codes", "scales", "zeros") if f"{name}.{part}" in graph.constants]
    rows, blocks = weight.scales.shape
    names = [
        graph.constant(f"{name}.codes", _packed(weight.codes, weight.bits).reshape(rows, blocks, -1)),
        graph.constant(f"{name}.scales", weight.scales),
    ]
    return names if weight.zeros is None else [*names, graph.constant(f"{name}.zeros", _packed(weight.zeros, weight.bits))]


def _packed(codes: UInt8, bits: int) -> UInt8:
    """uint8 [N, ceil(K · bits / 8)]: with 4 bits the even columns in the low halves."""
    if bits == 8:
        return codes
    even, odd = codes[:, 0::2], codes[:, 1::2]
    packed = even.copy()
    packed[:, : odd.shape[1]] |= odd << 4
    return packed
