from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from edgespec.orchestrator import engines
from edgespec.scheduling import meters, sensors
from edgespec.scheduling.meters import GuardedMeter
from edgespec.scheduling.readings import Reading
from edgespec.scheduling.sensors_simulated import SimulatedMeter


class Library:
    artifact_engines = ("onnx",)

    def __init__(self, why: str | None) -> None:
        self.why = why

    def why_not(self) -> str | None:
        return self.why

    def describe(self) -> str:
        return "Library 1.2, cpu"


@pytest.fixture
def backends(monkeypatch):
    """Three backends: one works, one says why not, one cannot even be imported."""

    def backend(name: str) -> Library:
        if name == "reference":
            raise ImportError("half installed")
        return Library({"onnx": None, "mlx": "mlx is not installed; pip install mlx"}[name])

    monkeypatch.setattr(engines, "backend", backend)


def test_json_says_what_works_and_why_not(command, backends, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = command("doctor", "--json")
    assert result.code == 0
    found = json.loads(result.out)
    assert found["backends"]["onnx"] == {"available": True, "why_not": None, "what": "Library 1.2, cpu"}
    assert found["backends"]["mlx"]["why_not"] == "mlx is not installed; pip install mlx"
    assert "half installed" in found["backends"]["reference"]["why_not"]
    assert found["machine"]["physical_cores"] >= 1
    assert found["machine"]["memory_bytes"] > found["machine"]["memory_available_bytes"] > 0
    assert found["machine"]["preset_variables"]["OMP_NUM_THREADS"] == "1"
    assert found["disk_free_bytes"] > 0
    assert found["models"] == {}
    assert any("Metal" in place for place in found["never_run_on"])


def test_text_for_people(command, backends, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = command("doctor")
    assert result.code == 0
    assert "onnx: Library 1.2, cpu" in result.out and "environment OMP_NUM_THREADS=1" in result.out
    assert "mlx: not available: mlx is not installed; pip install mlx" in result.out
    assert "run `edgespec pull smollm2-135m`" in result.out


def test_a_model_that_is_not_there(command, backends):
    result = command("doctor", "--model", "absent")
    assert result.code == 1
    assert "edgespec pull absent" in result.err


def test_what_would_run_a_model(backends):
    from edgespec_apps.doctor import choices

    artifact = SimpleNamespace(engine="onnx", recipe="int8", weight_bytes=3_000_000)
    decoder = SimpleNamespace(kv_bytes_per_token=lambda: 100, max_context=50)
    manifest = SimpleNamespace(
        name="m", draft=None, decoder=decoder, source={}, artifacts=(artifact,), find=lambda engine, recipe: artifact
    )
    found = choices(SimpleNamespace(manifest=manifest))  # type: ignore[arg-type]
    assert found["backends"]["onnx"] == "onnx int8, 3 MB of weights, Library 1.2, cpu"
    assert "mlx is not installed" in found["backends"]["mlx"]
    assert found["auto"] == "onnx"
    assert (found["draft"], found["kv_bytes_at_full_context"]) == ("ngram", 5000)


def test_a_model_is_shown_with_the_memory_its_context_takes(backends, capsys):
    from edgespec_apps.doctor import examine, print_report

    model = {
        "name": "m",
        "draft": "ngram",
        "auto": "onnx",
        "max_context": 50,
        "kv_bytes_at_full_context": 380e6,
        "backends": {},
        "where": {},
    }
    print_report(examine(None) | {"model": model})
    assert "m, draft ngram, context up to 50 tokens (0.38 GB of cache when full)" in capsys.readouterr().out


def test_sensors_and_energy_meters_that_work_and_why_others_do_not(command, backends, monkeypatch):
    reading = Reading(source="battery", battery=0.42, thermal="serious", temperature_c=91.0)
    monkeypatch.setattr(sensors, "try_sources", lambda: {"heatpipe": reading, "mute": Reading(), "absent": "OSError: no library"})
    working = GuardedMeter(SimulatedMeter([(0.0, 5.0)]))
    monkeypatch.setattr(meters, "try_meters", lambda: {"counter": "OSError: only root may read it", "simulated": working})
    found = json.loads(command("doctor", "--json").out)
    assert found["sensors"]["heatpipe"]["reading"] == {"source": "battery", "battery": 0.42, "thermal": "serious", "temperature_c": 91.0}
    assert found["sensors"]["absent"] == {"available": False, "why_not": "OSError: no library", "reading": None}
    assert "neither heat nor battery" in found["sensors"]["mute"]["why_not"]
    assert found["energy_meters"] == {
        "counter": {"available": False, "why_not": "OSError: only root may read it"},
        "simulated": {"available": True, "why_not": None},
    }
    text = command("doctor").out
    assert "heatpipe: on battery, battery at 42%, heat serious, hottest 91 °C" in text
    assert "absent: not available: OSError: no library" in text
    assert "counter: not available: OSError: only root may read it" in text
    assert "simulated: works" in text


def test_a_system_without_sensors(command, backends, monkeypatch):
    monkeypatch.setattr(sensors, "try_sources", dict)
    monkeypatch.setattr(meters, "try_meters", dict)
    assert command("doctor").out.count("none known for this system") == 2
