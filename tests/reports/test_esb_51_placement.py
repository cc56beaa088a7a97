"""ESB-51: where the work runs is found out, said in nodes and share of the cost, and can be required."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import edgespec
from edgespec.backends.placement_coreml import read_plan
from edgespec.backends.placement_onnx import read_profile, unit_of
from edgespec.core.engine import Engine, TokenBatch
from edgespec.core.errors import ArtifactError, CapabilityError, DeviceError
from edgespec.core.placement import Placement, UnitWork, check_placement
from edgespec_apps.profile import this_machine
from edgespec_device_profiles import report
from edgespec_device_profiles.measure import Profiler, Settings
from edgespec_device_profiles.measured import Model, parse, to_toml
from tests.helpers.command import edgespec as command
from tests.helpers.engines import ENGINES, EngineCase, make_onnx
from tests.helpers.timed import Clock, example, prompt, timed_runtime
from tests.helpers.tiny import tiny_checkpoint, tiny_config, tiny_tensors, write_hf
from tests.helpers.toys import toy_lm

QNN, CPU, COREML = "QNNExecutionProvider", "CPUExecutionProvider", "CoreMLExecutionProvider"
HTP = {QNN: {"backend_path": "C:\\libs\\QnnHtp.dll"}}
MIXED = Placement(units={"npu": UnitWork(nodes=56, share=0.9, by=QNN), "cpu": UnitWork(nodes=1, share=0.1, by=CPU)}, source="timed")
IDLE_NPU = Placement(units={"npu": UnitWork(nodes=1, share=0.0), "cpu": UnitWork(nodes=56, share=1.0)}, source="timed")


def kernel(name: str, provider: str, us: float, *, ts: float, op: str = "MatMul", index: int = 0) -> dict[str, Any]:
    """As ONNX Runtime 1.32 writes it."""
    arguments = {"provider": provider, "op_name": op, "node_index": str(index)}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ph": "X", "ts": ts, "dur": us, "args": arguments}


def one_pass(ts: float) -> dict[str, Any]:
    return {"cat": "Session", "name": "model_run", "ph": "X", "ts": ts, "dur": 90, "args": {}}


# A graph of seven nodes: six were fused into one for the NPU, `Det` it cannot do. The first pass also sets things up.
FUSED = [
    {"cat": "Session", "name": "session_initialization", "ph": "X", "ts": 3, "dur": 95962, "args": {}},
    kernel("fused", QNN, 90_000, ts=100, op="fused", index=7),
    kernel("det", CPU, 1, ts=101, op="Det", index=4),
    one_pass(99),
    kernel("fused", QNN, 30, ts=200, op="fused", index=7),
    {"cat": "Node", "name": "det_fence_before", "ph": "X", "ts": 201, "dur": 5000, "args": {"op_name": "Det"}},
    kernel("det", CPU, 70, ts=202, op="Det", index=4),
    one_pass(199),
]


# --- what ONNX Runtime did -------------------------------------------------------------------------------------------


def test_esb_51_a_dynamic_graph_on_the_cpu_is_all_cpu(tmp_path: Path) -> None:
    """From the library's own profile, whatever the number of rows."""
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("Softmax", ["a"], ["y"]),
            helper.make_node("NonZero", ["y"], ["where"]),  # how many there are is known only afterwards: not for accelerators
        ],
        "g",
        [tensor("x", TensorProto.FLOAT, ["rows", 64])],
        [tensor("y", TensorProto.FLOAT, ["rows", 64]), tensor("where", TensorProto.INT64, [2, "found"])],
        [helper.make_tensor("w", TensorProto.FLOAT, [64, 64], np.eye(64, dtype=np.float32).ravel())],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "g.onnx")
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(str(tmp_path / "g.onnx"), options, providers=[CPU])
    for rows in (1, 7, 300):
        session.run(None, {"x": np.ones((rows, 64), np.float32)})
    found = read_profile(Path(session.end_profiling()).read_text(), options=session.get_provider_options())
    assert (found.label, found.units) == ("cpu", {"cpu": UnitWork(nodes=3, share=1.0, by=CPU)})


@pytest.mark.parametrize("case", ENGINES, ids=lambda case: case.name)
def test_esb_51_every_engine_tells_where_its_work_runs(case: EngineCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = case.make(tiny_checkpoint(tiny_config("llama")), tmp_path / "package")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "here")
    cache = engine.new_cache(8)
    before = engine.forward([(TokenBatch.chain([1, 2]), cache)])[0].logits.row(1).copy()
    found = engine.placement()  # type: ignore[attr-defined]
    after = engine.forward([(TokenBatch.chain([1, 2]), cache)])[0].logits.row(1)
    np.testing.assert_array_equal(after, before)
    assert found.label == engine.capabilities.unit
    assert found.share(found.label) == 1.0 and found.nodes >= 5
    assert not [*(tmp_path / "tmp").iterdir(), *(tmp_path / "here").iterdir()], "no file is left behind"
    engine.close()


def test_esb_51_a_closed_engine_and_a_graph_that_is_gone_say_so(tmp_path: Path) -> None:
    engine = make_onnx(tiny_checkpoint(tiny_config("llama")), tmp_path)
    (graph,) = tmp_path.rglob("model.onnx")
    graph.write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"model.onnx has 0 bytes"):
        engine.placement()  # type: ignore[attr-defined]
    engine.close()
    with pytest.raises(DeviceError, match="is closed"):
        engine.placement()  # type: ignore[attr-defined]


def test_esb_51_an_operator_that_falls_back_shows_in_nodes_and_shares() -> None:
    found = read_profile(json.dumps(FUSED), assigned={QNN: 6, CPU: 1}, options=HTP, machine="arm64")
    assert found.units == {"npu": UnitWork(nodes=6, share=0.3, by=QNN), "cpu": UnitWork(nodes=1, share=0.7, by=CPU)}
    assert found.label == "cpu", "it has most of the time, though one node only"
    fused = read_profile(json.dumps(FUSED), options=HTP, machine="arm64")
    assert fused.units["npu"].nodes == 1, "without the assignment a fused node is one"
    only_first = read_profile(json.dumps(FUSED[:4]), assigned={QNN: 6, CPU: 1}, options=HTP, machine="arm64")
    assert only_first.label == "npu", "of a single pass the first is all there is"


def test_esb_51_a_loop_is_not_counted_on_top_of_what_runs_inside_it() -> None:
    events = [kernel("in", QNN, 90, ts=1), kernel("in", QNN, 90, ts=2), kernel("loop", CPU, 200, ts=3, op="Loop")]
    found = read_profile(json.dumps(events), options=HTP, machine="arm64")
    assert found.units == {"npu": UnitWork(nodes=1, share=1.0, by=QNN), "cpu": UnitWork(nodes=1, share=0.0, by=CPU)}


@pytest.mark.parametrize(
    ("provider", "options", "machine", "unit"),
    [
        (CPU, {}, "x86_64", "cpu"),
        (QNN, HTP[QNN], "ARM64", "npu"),
        (QNN, {"backend_path": "/libs/libQnnHtp.so"}, "aarch64", "npu"),
        (QNN, {"backend_path": "/libs/libQnnHtp.so"}, "x86_64", "cpu"),  # an emulator
        (QNN, {"backend_type": "gpu"}, "aarch64", "gpu"),
        (QNN, {}, "aarch64", "unknown"),
        (COREML, {"MLComputeUnits": "CPUAndNeuralEngine"}, "arm64", "unknown"),
        (COREML, {"MLComputeUnits": "CPUOnly"}, "arm64", "cpu"),
        ("CUDAExecutionProvider", {}, "x86_64", "gpu"),
        ("NewExecutionProvider", {}, "arm64", "unknown"),
    ],
)
def test_esb_51_no_provider_is_called_more_than_it_is(provider: str, options: Mapping[str, str], machine: str, unit: str) -> None:
    assert unit_of(provider, options, machine=machine) == unit
    events = [kernel("a", provider, 5, ts=1)]
    assert read_profile(json.dumps(events), options={provider: options}, machine=machine).label == unit


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no JSON"),
        (json.dumps(FUSED)[:-40], "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"traceEvents": []}', "a list of events, got a dict"),
        ("[3]", "is an object, got 3"),
        ("[]", "has 0 nodes and no time"),
        (json.dumps([kernel("a", CPU, 0, ts=1)]), "has 1 nodes and no time"),
        (json.dumps([kernel("a", CPU, 1, ts=1) | {"args": None}]), "names no provider"),
        (json.dumps([kernel("a", CPU, 1, ts=1) | {"args": {"provider": 3}}]), "names no provider"),
        (json.dumps([kernel("a", CPU, -1, ts=1)]), "dur -1"),
        (json.dumps([kernel("a", CPU, float("nan"), ts=1)]), "dur nan"),
        (json.dumps([kernel("a", CPU, 10**400, ts=1)]), "dur 1000"),
        (json.dumps([kernel("a", CPU, 1, ts=1) | {"dur": "5"}]), "dur '5'"),
        (json.dumps([kernel("a", CPU, 1, ts=1), {"cat": "Session", "name": "model_run"}]), "ts None"),
    ],
)
def test_esb_51_a_damaged_profile_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        read_profile(text)


# --- what Core ML plans ----------------------------------------------------------------------------------------------


def test_esb_51_a_compute_plan_gives_nodes_and_estimated_cost() -> None:
    ane, cpu = "MLNeuralEngineComputeDevice", "MLCPUComputeDevice"
    found = read_plan({"w": (None, None), "conv": (ane, 0.03), "cast": (ane, None), "gather": (cpu, 0.09)})
    assert found.units == {"npu": UnitWork(nodes=2, share=0.25), "cpu": UnitWork(nodes=1, share=0.75)}
    assert found.label == "cpu"


@pytest.mark.parametrize(
    ("device", "cost", "says"),
    [
        ("MLQuantumComputeDevice", 1.0, "prefers 'MLQuantumComputeDevice'"),
        ("MLCPUComputeDevice", float("nan"), "costs nan"),
        ("MLCPUComputeDevice", -1.0, "costs -1"),
        ("MLCPUComputeDevice", None, "1 placed operations estimates no cost"),
        (None, None, "0 placed operations estimates no cost"),
    ],
)
def test_esb_51_a_damaged_compute_plan_is_refused_in_words(device: str | None, cost: float | None, says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        read_plan({"a": (device, cost)})


# --- the label -------------------------------------------------------------------------------------------------------

WORK = st.tuples(st.integers(1, 1000), st.integers(0, 10**6))


@given(st.dictionaries(st.sampled_from(["cpu", "gpu", "npu", "unknown"]), WORK, min_size=1).filter(lambda w: any(t for _, t in w.values())))
def test_esb_51_the_label_never_names_a_unit_without_work(works: dict[str, tuple[int, int]]) -> None:
    total = sum(us for _, us in works.values())
    units = {unit: UnitWork(nodes=nodes, share=us / total) for unit, (nodes, us) in works.items()}
    placement = Placement(units=units, source="made")
    assert placement.share(placement.label) == max(work.share for work in units.values()) > 0.0
    assert all(unit in placement.describe() for unit in works)


@pytest.mark.parametrize(
    ("units", "says"),
    [
        ({}, "sum to 1"),
        ({"cpu": {"nodes": 1, "share": 0.5}}, "sum to 1, got 0.5"),
        ({"tpu": {"nodes": 1, "share": 1.0}}, "got tpu"),
        ({"npu": {"nodes": 0, "share": 1.0}}, "without nodes"),
        ({"npu": {"nodes": -1, "share": 1.0}}, "nodes must be >= 0"),
        ({"cpu": {"nodes": 1, "share": float("nan")}}, "0..1, got nan"),
    ],
)
def test_esb_51_a_placement_that_makes_no_sense_is_refused(units: dict[str, dict[str, Any]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Placement(units={unit: UnitWork(**work) for unit, work in units.items()}, source="made")


# --- requiring a unit ------------------------------------------------------------------------------------------------


def placed(placement: Placement | None) -> Engine:
    engine: Any = toy_lm(1)
    if placement is not None:
        engine.placement = lambda: placement
    return engine


def test_esb_51_one_of_the_two_models_must_mostly_run_there() -> None:
    check_placement("npu", placed(MIXED))
    check_placement("npu", placed(IDLE_NPU), placed(MIXED))
    check_placement("cpu", placed(IDLE_NPU))
    with pytest.raises(CapabilityError, match=r"asked for npu, but toy: 1 of 57 nodes \(0% of the cost\) run there"):
        check_placement("npu", placed(IDLE_NPU), placed(IDLE_NPU))
    with pytest.raises(CapabilityError, match=r"1 of 57 nodes \(10% of the cost\) run there"):
        check_placement("cpu", placed(MIXED))


def test_esb_51_an_engine_that_cannot_tell_does_not_pass() -> None:
    class Silent:
        spec = toy_lm(1).spec

    silent: Any = Silent()
    with pytest.raises(CapabilityError, match="cannot tell where its work runs"):
        check_placement("cpu", silent)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("esb51")
    config = tiny_config("llama", layers=1, hidden=128, head_dim=16, ffn=192)
    source = write_hf(root / "tiny", config, tiny_tensors(config))
    result = command("convert", str(source), "--recipe", "float32", "--targets", "onnx,mlx", home=root / "home")
    assert result.code == 0, result.err
    return root / "home"


def test_esb_51_a_model_that_stays_on_the_cpu_is_refused_at_the_door(home: Path) -> None:
    package = home / "packages" / "tiny"
    with pytest.raises(
        CapabilityError, match=r"asked for npu, but tiny: 0 of \d+ nodes \(0% of the cost\) run there .*CPUExecutionProvider"
    ):
        edgespec.load(package, engine="onnx", draft="ngram", require_unit="npu")
    with edgespec.open(package, engine="onnx", draft=str(package), require_unit="cpu") as session:
        assert session.generate("a", max_tokens=2).stats.tokens
    with pytest.raises(ValueError, match="must be cpu, gpu, npu; got 'ane'"):
        edgespec.load(package, require_unit="ane")


def test_esb_51_the_command_refuses_with_what_it_found(home: Path) -> None:
    arguments = ("generate", "--model", "tiny", "--engine", "onnx", "--raw", "-n", "2", "a")
    refused = command(*arguments, "--require-unit", "npu", home=home)
    assert (refused.code, refused.out) == (1, "")
    assert "asked for npu, but tiny: 0 of" in refused.error()
    assert command(*arguments, "--require-unit", "cpu", home=home).code == 0


# --- saying it -------------------------------------------------------------------------------------------------------


def test_esb_51_doctor_says_where_each_engine_runs(home: Path) -> None:
    found = json.loads(command("doctor", "--model", "tiny", "--json", home=home).out)["model"]["where"]
    assert found["onnx"]["unit"] == "cpu" and found["onnx"]["units"]["cpu"]["share"] == 1.0
    assert found.keys() == {"onnx", "mlx"}
    text = command("doctor", "--model", "tiny", home=home).out
    assert "Where its work runs\n" in text and "  onnx: cpu (CPUExecutionProvider)" in text


def test_esb_51_doctor_says_what_it_could_not_find_out(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    (graph,) = (tmp_path / "home").rglob("model.onnx")
    graph.write_bytes(bytes(graph.stat().st_size))
    found = json.loads(command("doctor", "--model", "tiny", "--json", home=tmp_path / "home").out)["model"]["where"]
    assert "cannot be found out (ArtifactError" in found["onnx"]["what"]


def test_esb_51_a_profile_takes_its_label_from_what_was_found() -> None:
    """The engine calls itself an NPU; the work says otherwise."""
    clock = Clock()
    runtime = timed_runtime(clock)
    target: Any = runtime.target
    target.capabilities = replace(target.capabilities, unit="npu")
    target.placement = lambda: IDLE_NPU
    settings = Settings(seconds=0.1, contexts=(4,), rows=(1, 2), max_tokens=8, policy="fixed:2")
    profiler = Profiler(runtime, {"chat": [prompt("hi")]}, machine=this_machine(), settings=settings, bandwidth=lambda: 1.0, clock=clock)
    measured = profiler.run()
    assert (measured.model.unit, set(measured.units), measured.model.placement) == ("cpu", {"cpu"}, IDLE_NPU)


def test_esb_51_a_profile_keeps_and_shows_the_placement() -> None:
    model = Model(name="tiny", engine="toy", unit="npu", weight_bytes=1, kv_bytes_per_token=1, placement=MIXED)
    measured = example(model=model)
    assert parse(to_toml(measured), origin="f").model.placement == MIXED
    assert "56 of 57 nodes, 90%" in report.page(measured)
    with pytest.raises(ArtifactError, match=r"f: model: placement: the shares of all units must sum to 1"):
        parse(to_toml(measured).replace("share = 0.9", "share = 0.4"), origin="f")
