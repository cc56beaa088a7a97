"""What a session starts from on a machine with or without a measured profile and a chip file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.core.device import DeviceProfile
from edgespec.core.errors import ArtifactError
from edgespec.orchestrator.runtime import Runtime
from edgespec_apps.profile import this_machine
from edgespec_device_profiles import history, registry
from edgespec_device_profiles.measured import Model
from edgespec_device_profiles.registry import Detected
from tests.helpers import fake_runtime
from tests.helpers.timed import example

M4 = Detected(os="macOS 26", reported="Apple M4", memory_bytes=16 << 30, chip=registry.load("apple-m4"))
OTHER = Detected(os="Linux", reported="Some Processor", memory_bytes=16 << 30, chip=None)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> list[Detected]:
    """The one entry is what detection finds."""
    found = [M4]
    monkeypatch.setattr(registry, "detected", lambda: found[0])
    return found


@pytest.fixture
def started(command, chip, monkeypatch: pytest.MonkeyPatch):
    """The profile that an answer of model "tiny" was planned from."""
    profiles: list[DeviceProfile] = []
    session = Runtime.session
    monkeypatch.setattr(Runtime, "session", lambda self, **options: profiles.append(self.profile) or session(self, **options))

    def start() -> DeviceProfile:
        assert command("generate", "--model", "tiny", "hello").code == 0
        return fake_runtime.loads[-1]["profile"] or profiles[-1]  # type: ignore[return-value]  # the fake runtime keeps none

    return start


@pytest.fixture
def measured(tmp_path: Path):
    """Write a profile of this machine with that model into the store."""

    def write(model: str = "tiny") -> None:
        profile = example(machine=this_machine(), model=Model(name=model, engine="toy", unit="cpu", weight_bytes=1, kv_bytes_per_token=1))
        history.save(profile, tmp_path / "home" / "profiles")

    return write


def doctor(command) -> dict[str, str]:  # type: ignore[no-untyped-def]
    return json.loads(command("doctor", "--json").out)["profile"]


def test_a_known_chip_gives_estimates_for_the_model_and_its_unit(started):
    profile = started()
    assert profile.estimated and profile.chip == "Apple M4"
    assert "apple-m4" in profile.provenance and "tiny" in profile.provenance
    assert [unit for unit, rated in profile.units.items() if rated.forward_ms] == ["cpu"]


def test_an_unknown_chip_gives_nothing(started, chip):
    chip[0] = OTHER
    assert started() == DeviceProfile.generic()


def test_a_measured_profile_is_taken_before_a_chip_file(started, measured):
    measured()
    profile = started()
    assert not profile.estimated and profile.provenance.startswith("measured on 2026-01-02 with tiny")


def test_what_was_measured_with_another_model_is_an_estimate(started, measured):
    measured("large")
    profile = started()
    assert profile.estimated and profile.provenance.startswith("measured on 2026-01-02 with large")
    measured()
    assert not started().estimated


def test_a_unit_that_the_chip_file_does_not_describe(chip):
    from edgespec_apps.starting import chip_estimate

    spec = fake_runtime.load("tiny", draft="none").spec
    assert chip_estimate(spec, "npu") is not None
    assert chip_estimate(spec, "abacus") is None


def test_a_damaged_chip_file_is_told_and_no_obstacle(command, monkeypatch: pytest.MonkeyPatch):
    def broken() -> Detected:
        raise ArtifactError("apple-m4.toml is not valid TOML")

    monkeypatch.setattr(registry, "detected", broken)
    result = command("generate", "--model", "tiny", "hello")
    assert result.code == 0 and "ignoring the chip files: apple-m4.toml is not valid TOML" in result.err


def test_the_machine_is_asked_once(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    monkeypatch.setattr(registry, "detect", lambda: asked.append(1) or OTHER)
    registry.detected.cache_clear()
    assert registry.detected() is registry.detected() is OTHER
    registry.detected.cache_clear()
    assert asked == [1]


def test_doctor_says_which(command, chip, measured):
    found = doctor(command)
    assert found["kind"] == "estimated" and found["model"] == "smollm2-135m" and "apple-m4" in found["what"]
    chip[0] = OTHER
    found = doctor(command)
    assert found["kind"] == "none" and "no chip file for Some Processor" in found["what"]
    assert "Costs that the scheduler assumes at first for smollm2-135m\n  nothing: " in command("doctor").out
    measured("large")
    found = doctor(command)
    assert found["kind"] == "estimated" and "measured on 2026-01-02 with large" in found["what"]
    measured("smollm2-135m")
    found = doctor(command)
    assert found["kind"] == "measured" and "measured on 2026-01-02 with smollm2-135m" in found["what"]
