import numpy as np
import pytest

from edgespec.core.decoder import FAMILIES
from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Parity
from edgespec.orchestrator.text import Tokenizer
from edgespec_converters import parity
from edgespec_converters.parity import WARM_UP, check_gate, compare, engine_logits, streamed_logits
from edgespec_converters.recipes import Gate
from tests.helpers.engines import make_reference
from tests.helpers.tiny import tiny_checkpoint, tiny_config, tiny_tokenizer_files


def sequences_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 60, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_layer_by_layer_gives_the_reference_engines_logits(family, tmp_path):
    checkpoint = tiny_checkpoint(tiny_config(family))
    sequences = sequences_of((20, 5, 33))
    vocab_size = checkpoint.tokenizer.vocab_size
    streamed = streamed_logits(checkpoint.config, checkpoint.tensor, sequences, vocab_size=vocab_size)
    engine = make_reference(checkpoint, tmp_path)
    for ours, theirs, ids in zip(streamed, engine_logits(engine, sequences), sequences, strict=True):
        assert ours.shape == (len(ids) - WARM_UP, vocab_size)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_streaming_asks_for_each_tensor_once_and_in_order():
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    asked = []

    def tensor(name):
        asked.append(name)
        return checkpoint.tensor(name)

    steps = []
    streamed_logits(checkpoint.config, tensor, sequences_of((9,)), vocab_size=60, progress=lambda done, total: steps.append((done, total)))
    assert sorted(asked) == sorted(checkpoint.config.shapes())
    layers = [int(name.split(".")[2]) for name in asked if ".layers." in name]
    assert layers == sorted(layers)
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_compare_counts_what_it_says():
    p = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]], np.float32))
    q = np.log(np.array([[0.5, 0.4, 0.1], [0.1, 0.3, 0.6]], np.float32)) + 1.5  # a constant changes no law, only the logits
    found = compare([p], [q])
    kl = (0.7 * np.log(0.7 / 0.5) + 0.2 * np.log(0.2 / 0.4) + 0.6 * np.log(2) + 0.3 * np.log(0.5)) / 2
    assert found.n == 2
    assert found.argmax_agreement == 0.5
    assert found.kl == pytest.approx(kl, abs=1e-6)
    assert found.max_error == pytest.approx(1.5 + np.log(2), abs=1e-5)
    same = compare([p], [p])
    assert (same.argmax_agreement, same.kl, same.max_error) == (1.0, 0.0, 0.0)


def test_gate_names_what_was_found_and_what_is_asked():
    gate = Gate(argmax_agreement=0.9, kl=0.01)
    check_gate(Parity(argmax_agreement=0.9, kl=0.01, max_error=9.0, n=5), gate, "m")
    for agreement, kl in ((0.89, 0.0), (1.0, 0.02), (1.0, float("nan")), (float("nan"), 0.0)):
        with pytest.raises(ArtifactError, match=r"m strays .* \(at least 0.9\), KL .* \(at most 0.01\) on 5 positions"):
            check_gate(Parity(argmax_agreement=agreement, kl=kl, max_error=0.0, n=5), gate, "m")


def test_texts_become_bounded_sequences():
    files = tiny_tokenizer_files()
    tokenizer = Tokenizer.from_content(
        files.content, kind=files.kind, vocab_size=files.vocab_size, add_bos=False, bos_id=None, stop_ids=(2,)
    )
    sequences = parity.token_sequences(tokenizer)
    assert len(sequences) == len(parity.texts()) >= 10
    assert all(WARM_UP < len(ids) <= 48 and ids.dtype == np.int32 for ids in sequences)
    assert tokenizer.decode(sequences[0].tolist()) == parity.texts()[0][: len(tokenizer.decode(sequences[0].tolist()))]
