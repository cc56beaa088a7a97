import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from edgespec_converters.safetensors_file import ShardedWriter

TENSORS = {
    "a.weight": np.arange(24, dtype=np.uint32).reshape(4, 6),
    "a.scales": np.linspace(-1, 1, 8, dtype=np.float16).reshape(4, 2),
    "b": np.array([1e5, 1e-8, -3.0], ml_dtypes.bfloat16),
    "c": np.linspace(0, 1, 10, dtype=np.float32).reshape(2, 5)[:, ::-1],  # not contiguous
    "ünïcode “name”": np.array([1.0], np.float32),
}


def written(folder, shard_bytes):
    with ShardedWriter(folder, TENSORS, shard_bytes=shard_bytes) as writer:
        for name, array in TENSORS.items():
            writer.add(name, array)
    return writer.nbytes


def test_what_is_written_reads_back(tmp_path):
    nbytes = written(tmp_path, 1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert nbytes == {"model.safetensors": (tmp_path / "model.safetensors").stat().st_size}
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "mlx"}


def test_shards_hold_no_more_than_they_may_and_the_index_names_them(tmp_path):
    nbytes = written(tmp_path, 112)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == sorted(nbytes) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == TENSORS.keys()
    for name, file in weight_map.items():
        np.testing.assert_array_equal(load_file(tmp_path / file)[name], TENSORS[name])
    for file in files:
        assert sum(array.nbytes for array in load_file(tmp_path / file).values()) <= 112
    assert not list(tmp_path.glob("*.part"))


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path):
    assert len(written(tmp_path, 1)) == len(TENSORS)


def test_nothing_looks_finished_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), ShardedWriter(tmp_path, TENSORS, shard_bytes=1 << 20) as writer:
        writer.add("b", TENSORS["b"])
        raise RuntimeError
    assert not list(tmp_path.glob("*.safetensors"))
