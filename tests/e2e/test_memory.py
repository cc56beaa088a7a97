"""What a process holds while it answers: weights, keys and values, and at most 250 MB of everything else."""

from __future__ import annotations

import json
import sys

import pytest

from tests.helpers.processes import finish, start
from tests.helpers.real import need

ALLOWANCE_BYTES = 250_000_000

SCRIPT = """
import json, sys
from pathlib import Path
import edgespec

runtime = edgespec.load(sys.argv[1], engine="onnx", draft="ngram")
session = runtime.session(max_context=1024)
answer = session.generate("Write a Python function that reverses a string.", max_tokens=48)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
cache = session._cache
print(json.dumps({
    "resident": int(status["VmRSS"].split()[0]) * 1024,
    "weights": sum(file.nbytes for file in runtime.manifest.find("onnx").files.values()),
    "kv": cache.nbytes,
    "tokens": len(answer.token_ids),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    "name", [pytest.param("smollm2-135m", marks=pytest.mark.real), pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.heavy)]
)
def test_resident_memory_is_weights_and_cache_and_little_else(name: str) -> None:
    need(name)
    code, out, err = finish(start(SCRIPT, name), timeout_s=240)
    assert code == 0, err
    seen = json.loads(out)
    assert seen["tokens"] > 0
    # Rows of the cache that no token has touched are not resident; counting all of them is the weaker demand.
    assert seen["resident"] <= seen["weights"] + seen["kv"] + ALLOWANCE_BYTES, seen
