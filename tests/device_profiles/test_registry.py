from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgespec.core.errors import ArtifactError
from edgespec_device_profiles import chips, registry
from edgespec_device_profiles.registry import LocalProbe, detect

GOOD = """
schema = "edgespec.chip/1"
name = "x"
chip = "X"
year = 2024
match = ["X"]
cooling = ["fan"]
[figures]
bandwidth_gbs = { value = 100, estimate = false, source = "s" }
gpu_fp16_tflops = { value = 1, estimate = true, source = "s" }
performance_cores = { value = 4, estimate = false, source = "s" }
efficiency_cores = { value = 0, estimate = false, source = "s" }
max_memory_gb = { value = 8, estimate = false, source = "s" }
sustained_watts = { value = 10, estimate = true, source = "s" }
"""


@pytest.mark.parametrize("name", registry.names())
def test_every_chip_file_loads_and_describes_itself(name: str) -> None:
    chip = registry.load(name)
    assert chip.name == name
    assert registry.identify(chip.chip) == chip
    assert chip.figures["sustained_watts"].estimate  # nobody measured it
    profile = chip.device(os="test", memory_bytes=8)
    assert profile.units["gpu"].bandwidth_gbs == chip.value("bandwidth_gbs")
    assert all(not unit.forward_ms for unit in profile.units.values())
    assert profile.estimated and "nothing measured" in profile.provenance


def test_there_is_a_file_for_each_known_chip() -> None:
    assert len(registry.names()) == 42


def test_figures_keep_provenance() -> None:
    chip = registry.load("Apple M4")
    assert chip.value("bandwidth_gbs") == 120 and chip.value("npu_bandwidth_gbs") == 64.18
    assert not chip.figures["bandwidth_gbs"].estimate and "gpu_fp16_tflops" in chip.estimates
    assert registry.load("apple-m5-pro").device().overlap_penalty == pytest.approx(1.032)
    assert registry.load("apple-a14").figures["performance_cores"].estimate  # recalled, not looked up
    assert chip.value("overlap_penalty") is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("edgespec.chip/1", "edgespec.chip/9"), "schema is 'edgespec.chip/9'"),
        (("year = 2024", 'year = "new"'), "year is 'new', expected int"),
        (('cooling = ["fan"]', 'cooling = ["ice"]'), "cooling is"),
        (('match = ["X"]', "match = []"), "match is"),
        (("bandwidth_gbs", "bandwith_gbs"), r"unknown figures \['bandwith_gbs'\], missing figures \['bandwidth_gbs'\]"),
        (("value = 100", 'value = "fast"'), "figure bandwidth_gbs: value is 'fast'"),
        (("value = 100", "value = -1"), "expected a number > 0"),
        (("value = 100", "value = 0"), "expected a number > 0"),
        (("value = 100", "value = inf"), "expected a number > 0"),
        (("value = 100", "value = 1" + "0" * 400), "expected a number > 0"),
        (("value = 100", "value = " + "1" * 5000), "not valid TOML"),
        (("value = 100", "value = " + "[" * 10_000), "not valid TOML"),
        (('value = 100, estimate = false, source = "s"', "value = 100"), "expected value, estimate and source"),
        (('source = "s" }\ngpu', 'source = "" }\ngpu'), "needs estimate"),
        (("[figures]", "[figures"), "not valid TOML"),
    ],
)
def test_damaged_files_are_refused_by_name(change: tuple[str, str], complaint: str) -> None:
    assert chips.parse(GOOD, origin="good.toml").chip == "X"
    with pytest.raises(ArtifactError, match=complaint) as caught:
        chips.parse(GOOD.replace(*change), origin="bad.toml")
    assert "bad.toml" in str(caught.value)


def test_unknown_names_list_near_ones() -> None:
    with pytest.raises(ArtifactError, match="apple-m4-max") as caught:
        registry.load("apple-m99")
    assert "snapdragon" not in str(caught.value)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("Apple M4", "apple-m4"),
        ("Apple M4 Max", "apple-m4-max"),
        ("Apple M1 Pro (Virtual)", "apple-m1-pro"),
        ("Snapdragon(R) X Elite - X1E80100 - Qualcomm(R) Oryon(TM) CPU", "snapdragon-x-elite"),
        ("QTI SM8750", "snapdragon-8-elite"),
        ("Mediatek MT6991 mt6991", "dimensity-9400"),
        ("Intel(R) Xeon(R) Processor", None),
        ("Apple M40", None),
    ],
)
def test_reported_names_find_their_chip(reported: str, name: str | None) -> None:
    found = registry.identify(reported)
    assert (found.name if found else None) == name


class FakeSystem:
    def __init__(self, system: str, commands: dict[str, str] | None = None, files: dict[str, str] | None = None) -> None:
        self._system, self._commands, self._files = system, commands or {}, files or {}

    def system(self) -> str:
        return self._system

    def run(self, command: Sequence[str]) -> str | None:
        return self._commands.get(" ".join(command))

    def read(self, path: str) -> str | None:
        return self._files.get(path)


def test_macos() -> None:
    answers = {
        "sw_vers -productVersion": "26.2",
        "sysctl -n machdep.cpu.brand_string": "Apple M4 Max",
        "sysctl -n hw.memsize": "68719476736",
    }
    found = detect(FakeSystem("Darwin", answers))
    assert (found.os, found.memory_bytes) == ("macOS 26.2", 64 << 30)
    assert found.chip is not None and found.chip.name == "apple-m4-max"
    assert found.profile().units["npu"].bandwidth_gbs == 118.88


def test_linux_without_a_chip_file_assumes_nothing() -> None:
    files = {"/proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\n", "/proc/meminfo": "MemTotal:       8000000 kB\n"}
    found = detect(FakeSystem("Linux", files=files))
    assert (found.os, found.reported, found.chip) == ("Linux", "Intel(R) Xeon(R)", None)
    profile = found.profile()
    assert profile.memory_bytes == 8_192_000_000 and not profile.units and profile.chip == "Intel(R) Xeon(R)"


def test_linux_on_an_arm_board() -> None:
    found = detect(FakeSystem("Linux", files={"/proc/cpuinfo": "processor: 0\n", "/proc/device-tree/model": "Some Board\0"}))
    assert found.reported == "Some Board"


def test_android_is_linux_with_properties() -> None:
    answers = {"getprop ro.build.version.release": "16", "getprop ro.soc.manufacturer": "QTI", "getprop ro.soc.model": "SM8650"}
    found = detect(FakeSystem("Linux", answers, {"/proc/meminfo": "MemTotal: 12000000 kB"}))
    assert found.os == "Android 16" and found.memory_bytes == 12_288_000_000
    assert found.chip is not None and found.chip.name == "snapdragon-8-gen-3" and found.chip.cooling == ("phone",)


def test_windows() -> None:
    key = r"reg query HKLM\HARDWARE\DESCRIPTION\System\CentralProcessor\0 /v ProcessorNameString"
    brand = "\r\nHKEY...\r\n    ProcessorNameString    REG_SZ    Snapdragon(R) X2 Elite Extreme - X2E96100\r\n"
    memory = "powershell -NoProfile -Command (Get-CimInstance Win32_ComputerSystem).TotalPhysicalMemory"
    found = detect(FakeSystem("Windows", {key: brand, memory: "51539607552"}))
    assert found.chip is not None and found.chip.name == "snapdragon-x2-elite-extreme" and found.memory_bytes == 48 << 30


@pytest.mark.parametrize("system", ["Darwin", "Linux", "Windows", "Android", "Plan 9", ""])
def test_a_system_that_answers_nothing_is_no_error(system: str) -> None:
    found = detect(FakeSystem(system))
    assert found.chip is None and found.memory_bytes is None
    assert found.profile().units == {}


def test_the_local_probe_never_raises() -> None:
    probe = LocalProbe()
    assert probe.run(["edgespec-no-such-command"]) is None
    assert probe.read("/no/such/file") is None
    assert isinstance(detect(probe).os, str)
