import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from edgespec_converters.checkpoint import StoredTensor
from edgespec_converters.quantize import exact, quantize


def weights(rows=12, columns=128, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_weight_comes_back_within_the_blocks_resolution(bits, symmetric, block):
    w = weights()
    q = quantize(w, bits=bits, block=block, symmetric=symmetric)
    assert (q.bits, q.block, q.codes.dtype, q.codes.shape) == (bits, block, np.uint8, w.shape)
    assert q.codes.max() < 1 << bits
    assert (q.zeros is None) == symmetric
    blocks, back = w.reshape(12, -1, block), q.dequantize().reshape(12, -1, block)
    # A naive scale, without any search, reaches half a step everywhere: the mean square may not be worse than that.
    span = 2 * np.abs(blocks).max(-1) if symmetric else np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)
    step = span / ((1 << bits) - 2)
    assert np.all(np.sqrt(np.square(blocks - back).mean(-1)) <= step / 2)


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_search_beats_the_naive_scale(symmetric):
    w = weights(64, 512)
    error = np.square(quantize(w, bits=4, block=32, symmetric=symmetric).dequantize() - w).sum()
    blocks = w.reshape(64, -1, 32)
    if symmetric:
        scale, zero = np.abs(blocks).max(-1, keepdims=True) / 7, 8
    else:
        scale = (blocks.max(-1, keepdims=True) - blocks.min(-1, keepdims=True)) / 15
        zero = np.rint(-blocks.min(-1, keepdims=True) / scale)
    naive = (np.clip(np.rint(blocks / scale + zero), 0, 15) - zero) * scale
    assert error < np.square(naive - blocks).sum() * 0.97


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 3.5, -3.5])
def test_constant_blocks_are_exact(bits, symmetric, value):
    w = np.full((2, 32), value, np.float32)
    np.testing.assert_allclose(quantize(w, bits=bits, block=32, symmetric=symmetric).dequantize(), w, rtol=1e-6)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_stored_blocks_that_map_exactly_stay_exact(kind):
    ggml = GGMLQuantizationType[kind]
    data = quants.quantize(weights(), ggml)
    q = exact(StoredTensor(kind=kind, shape=(12, 128), data=data))
    assert q is not None
    np.testing.assert_array_equal(q.dequantize(), quants.dequantize(data, ggml))
    assert (q.bits, q.block, q.zeros) == ({"Q8_0": 8, "Q4_0": 4}[kind], 32, None)


def test_other_stored_types_do_not_map():
    assert exact(StoredTensor(kind="F32", shape=(12, 128), data=weights())) is None
    data = quants.quantize(weights(), GGMLQuantizationType.Q4_1)
    assert exact(StoredTensor(kind="Q4_1", shape=(12, 128), data=data)) is None


@pytest.mark.parametrize("symmetric", [True, False])
def test_scale_and_bias_form_says_the_same(symmetric):
    q = quantize(weights(), bits=4, block=32, symmetric=symmetric)
    form = q.codes.reshape(12, 4, 32) * q.scales[..., None] + q.biases()[..., None]
    np.testing.assert_allclose(form.reshape(12, 128), q.dequantize(), atol=1e-6)


def test_rows_are_independent_of_their_chunk():
    w = weights(3000, 256)
    whole = quantize(w, bits=4, block=32, symmetric=False)
    one = quantize(w[2999:], bits=4, block=32, symmetric=False)
    np.testing.assert_array_equal(whole.codes[2999:], one.codes)


def test_memory_beyond_the_result_stays_small():
    w = weights(8192, 1024)  # 32 MiB
    tracemalloc.start()
    q = quantize(w, bits=4, block=32, symmetric=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert q.zeros is not None
    assert peak - q.codes.nbytes - q.scales.nbytes - q.zeros.nbytes < 16 << 20


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    w = weights()
    w[3, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(w, bits=8, block=32, symmetric=True)


def test_esb_63_block_that_does_not_divide_is_refused_not_truncated():
    with pytest.raises(ValueError, match="block 64 does not divide the 96 columns"):
        quantize(weights(2, 96), bits=8, block=64, symmetric=True)


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="3 bits"):
        quantize(weights(), bits=3, block=32, symmetric=True)
