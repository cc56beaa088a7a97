"""One affine block quantiser for every target: weight = (code - zero) * scale, one scale and zero per block of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.core.errors import ArtifactError
from edgespec.core.scores import Float32
from edgespec_converters.checkpoint import Checkpoint, StoredTensor
from edgespec_converters.recipes import Format

UInt8 = NDArray[np.uint8]

_CHUNK = 1 << 18  # weights worked on at once: temporaries stay in the processor's cache
# How far the outermost weight may be clipped so that the others are hit better; with 8 bits clipping never pays.
_SHRINK = {4: (1.0, 0.95, 0.9, 0.85, 0.8), 8: (1.0,)}


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """`codes` uint8 [N, K], one code a byte; `scales` float32 [N, K / block]; `zeros` uint8 [N, K / block].

    `zeros` None means the middle of the range everywhere: 2^(bits - 1).
    """

    codes: UInt8
    scales: Float32
    zeros: UInt8 | None
    bits: int

    @property
    def block(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def nbytes(self) -> int:
        """Packed size, as read once per token: codes, scales and zeros."""
        return self.codes.size * self.bits // 8 + self.scales.nbytes + (0 if self.zeros is None else self.zeros.size * self.bits // 8)

    def biases(self) -> Float32:
        """float32 [N, K / block]: what is added in the form weight = code * scale + bias."""
        return -self.scales * (np.float32(self.middle) if self.zeros is None else self.zeros.astype(np.float32))

    def dequantize(self) -> Float32:
        """float32 [N, K]."""
        rows, columns = self.codes.shape
        out = np.empty((rows, columns), np.float32)
        for part in _chunks(rows, columns):
            codes = self.codes[part].reshape(-1, self.scales.shape[1], self.block).astype(np.float32)
            zero = np.float32(self.middle) if self.zeros is None else self.zeros[part, :, None].astype(np.float32)
            out[part] = ((codes - zero) * self.scales[part, :, None]).reshape(-1, columns)
        return out


def quantize(weight: Float32, *, bits: int, block: int, symmetric: bool) -> Quantized:
    """Quantise `weight` float32 [N, K] in blocks along K; the scale of each block minimises its squared error among a few.

    Works in chunks of rows: beyond its result it needs a few megabytes. ValueError for other widths than 4 and 8 bits, for a
    block that does not divide K, and for weights that are not finite (integer kernels would turn them into plausible numbers).
    """
    rows, columns = weight.shape
    if bits not in _SHRINK:
        raise ValueError(f"cannot quantise to {bits} bits; choose 4 or 8")
    if block <= 0 or columns % block:
        raise ValueError(f"block {block} does not divide the {columns} columns of this weight")
    candidates = _symmetric if symmetric else _asymmetric
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((rows, columns // block), np.float32)
    zeros = None if symmetric else np.empty((rows, columns // block), np.uint8)
    for part in _chunks(rows, columns):
        blocks = np.ascontiguousarray(weight[part], np.float32).reshape(-1, block)
        if not np.isfinite(blocks).all():
            raise ValueError("the weight holds NaN or infinity")
        best, scale, zero = _best(blocks, bits, candidates)
        codes[part] = best.reshape(-1, columns)
        scales[part] = scale.reshape(-1, columns // block)
        if zeros is not None:
            zeros[part] = zero.reshape(-1, columns // block)
    return Quantized(codes, scales, zeros, bits)


def exact(stored: StoredTensor) -> Quantized | None:
    """The stored blocks themselves, for the GGML types that already are (code - middle) * scale; None for all others."""
    if stored.kind not in ("Q8_0", "Q4_0"):
        return None
    rows, columns = stored.shape
    packed: UInt8 = stored.data.reshape(rows, columns // 32, -1)  # [N, K/32, 2 bytes of float16 scale + codes]
    scales = np.ascontiguousarray(packed[:, :, :2]).view(np.float16)[:, :, 0].astype(np.float32)
    if stored.kind == "Q8_0":
        codes: UInt8 = np.bitwise_xor(packed[:, :, 2:], 0x80, dtype=np.uint8)  # two's complement to offset binary
        return Quantized(codes.reshape(rows, columns), scales, None, 8)
    nibbles = packed[:, :, 2:]  # byte i: column i in the low half, column i + 16 in the high half
    columns_in_order: UInt8 = np.concatenate([np.bitwise_and(nibbles, 0x0F), np.right_shift(nibbles, 4)], axis=-1, dtype=np.uint8)
    return Quantized(columns_in_order.reshape(rows, columns), scales, None, 4)


def quantize_tensor(checkpoint: Checkpoint, name: str, format: Format) -> Quantized:
    """A checkpoint's matrix in `format`; stored blocks of the same bits that map exactly are taken as they are.

    Such blocks have 32 columns whatever `format.block` says, and no zeros. ArtifactError for weights that are not finite.
    """
    if format.bits in (4, 8) and (kept := exact(checkpoint.stored(name))) is not None and kept.bits == format.bits:
        return kept
    try:
        return quantize(checkpoint.tensor(name), bits=format.bits, block=format.block, symmetric=format.symmetric)
    except ValueError as error:
        raise ArtifactError(f"{checkpoint.name}: cannot quantise {name}: {error}") from error


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


_Candidates = Callable[[Float32, int], Iterator[tuple[Float32, Float32]]]


def _best(blocks: Float32, bits: int, candidates: _Candidates) -> tuple[UInt8, Float32, Float32]:
    """Codes [B, block], scales and zeros [B, 1] with the least squared error among the candidates."""
    top = np.float32((1 << bits) - 1)
    codes = scale = zero = least = None
    for new_scale, new_zero in candidates(blocks, bits):
        step = np.where(new_scale == 0, np.float32(1), new_scale)
        new = np.clip(np.rint(blocks / step + new_zero), 0, top)
        error = np.square((new - new_zero) * new_scale - blocks).sum(-1, keepdims=True)
        if codes is None or scale is None or zero is None or least is None:
            codes, scale, zero, least = new.astype(np.uint8), new_scale, new_zero, error
            continue
        better = error < least
        np.copyto(codes, new.astype(np.uint8), where=better)
        scale, zero, least = np.where(better, new_scale, scale), np.where(better, new_zero, zero), np.minimum(error, least)
    assert codes is not None and scale is not None and zero is not None
    return codes, scale, zero


def _symmetric(blocks: Float32, bits: int) -> Iterator[tuple[Float32, Float32]]:
    """The code range reaches one step further down than up, so the outermost weight goes to the bottom, whatever its sign."""
    middle = np.float32(1 << (bits - 1))
    high, low = blocks.max(-1, keepdims=True), blocks.min(-1, keepdims=True)
    outermost = np.where(high > -low, high, low)
    zero = np.full_like(outermost, middle)
    for shrink in _SHRINK[bits]:
        yield outermost * np.float32(-shrink) / middle, zero
        yield np.abs(outermost) * np.float32(shrink) / (middle - 1), zero


def _asymmetric(blocks: Float32, bits: int) -> Iterator[tuple[Float32, Float32]]:
    """From the least to the greatest weight, zero included so that the zero point fits the code range."""
    top = np.float32((1 << bits) - 1)
    high = np.maximum(blocks.max(-1, keepdims=True), np.float32(0))
    low = np.minimum(blocks.min(-1, keepdims=True), np.float32(0))
    for shrink in _SHRINK[bits]:
        scale = (high - low) * np.float32(shrink) / top
        zero = np.clip(np.rint(-low * np.float32(shrink) / np.where(scale == 0, np.float32(1), scale)), 0, top)
        yield scale, zero
