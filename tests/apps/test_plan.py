from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from edgespec import analysis
from edgespec_apps import cli
from edgespec_apps.planning import RESERVE_BYTES, RESERVE_SHARE, Question, answer, bytes_from
from edgespec_device_profiles import cooling, registry
from edgespec_device_profiles.estimates import bandwidth_gbs, size_from_name


def question(
    model: str, *, device: str = "snapdragon-8-gen-3", case: str = "phone", memory_gb: float = 16.0, draft: str | None = None
) -> Question:
    return Question(
        chip=registry.load(device),
        case=cooling.case(case),
        target=size_from_name(model),
        draft=size_from_name(draft) if draft else None,
        memory_bytes=memory_gb * 1e9,
        watts=None,
        cores=None,
        alpha=0.75,
        context=2048,
    )


def test_seven_billion_on_a_phone_with_four_gigabytes() -> None:
    """4.5 bits a weight are 3.94 GB; a phone leaves 4·¾ − .25 = 2.75 GB: it does not fit, and 2.9 bits would."""
    found = answer(replace(question("7b", memory_gb=4.0), watts=10.0, cores=4))
    assert not found["fits"] and found["bound_by"] == "memory"
    memory = found["memory"]
    assert memory["weight_bytes"] == pytest.approx(7e9 * 4.5 / 8)
    assert memory["available_bytes"] == pytest.approx(4e9 * (1 - RESERVE_SHARE) - RESERVE_BYTES)
    assert memory["sequences"] == 0
    bits = (memory["available_bytes"] - memory["kv_bytes"]) * 8 / 7e9
    assert any(f"{bits:.1f} bits per weight" in line for line in found["would_change"])
    assert any("at 4.5 bits a model of 4.5 billion weights" in line for line in found["would_change"])
    tiny = answer(question("7b", memory_gb=0.3))["would_change"]
    assert not any("bits" in line for line in tiny) and any("GB of memory" in line for line in tiny), "no model fits in nothing"
    smaller = answer(replace(question("7b", memory_gb=4.0), target=size_from_name("7b", bits=bits - 0.05)))
    assert smaller["fits"]


def test_speed_never_beats_the_bandwidth_of_its_unit() -> None:
    for device, case in (("snapdragon-8-gen-3", "phone"), ("apple-m4-max", "fan"), ("apple-m2-ultra", "desktop")):
        ask = question("3b", device=device, case=case)
        found = answer(ask)
        kv = ask.target.kv_bytes_per_token * ask.context
        floor = analysis.decode_floor_ms(ask.target.weight_bytes, kv, bandwidth_gbs(ask.chip, found["unit"]))
        assert found["tok_s_cold"] < 1e3 / floor
        low, high = found["tok_s"]
        assert low < high and found["estimates"] is True


def test_what_holds_it_back() -> None:
    assert answer(question("3b"))["bound_by"] == "heat"
    assert answer(question("70b", device="apple-m2-ultra", case="desktop", memory_gb=192))["bound_by"] == "bandwidth"
    low_power = replace(question("14b", device="apple-m2-ultra", case="desktop", memory_gb=64), watts=10.0)
    found = answer(low_power)
    assert found["bound_by"] == "power"
    assert found["joules_per_token"] < answer(replace(low_power, watts=None))["joules_per_token"]  # slower, but frugal
    assert found["tok_s"][1] < answer(replace(low_power, watts=None))["tok_s"][1]


def test_the_draft_is_judged_by_speed_and_memory() -> None:
    good = answer(question("8b", device="apple-m4-max", case="fan", draft="600m"))["with_draft"]
    assert good["best_draft_length"] > 0 and good["speed_up"] > 1.5 and good["small_enough"] and good["fast_enough"]
    large = answer(question("8b", device="apple-m4-max", case="fan", draft="4b"))["with_draft"]
    assert not large["small_enough"] and large["speed_up"] < good["speed_up"]
    hopeless = answer(replace(question("8b", device="apple-m4-max", case="fan", draft="7b"), alpha=0.1))["with_draft"]
    assert hopeless["best_draft_length"] == 0 and hopeless["speed_up"] == 1.0
    assert answer(question("8b"))["with_draft"] is None


def test_memory_is_written_as_people_write_it() -> None:
    assert [bytes_from(text) for text in ("4GB", "4 gb", "4000MB", "4e9", "512k")] == [4e9, 4e9, 4e9, 4e9, 512e3]
    for bad in ("", "much", "-4GB", "nanGB", "infGB", "0"):
        with pytest.raises(ValueError, match="no amount of memory"):
            bytes_from(bad)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    arguments = ["plan", "--device", "snapdragon-8-gen-3", "--model", "7b", "--memory", "4GB", "--watts", "10", "--cores", "4"]
    assert cli.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "edgespec.plan/1" and found["fits"] is False
    assert found["on_cores"]["cores"] == 4 and 0 < found["on_cores"]["tok_s"] <= found["on_cores"]["tok_s_cold"]
    assert cli.run([*arguments, "--draft", "500m"]) == 0
    printed = capsys.readouterr().out
    assert "estimates" in printed and "does not fit" in printed and "if it did fit" in printed
    assert "CPU only   on 4 cores about " in printed and "note       `edgespec profile` on the device" in printed
    assert "7b at 4.5 bits per weight on Snapdragon 8 Gen 3 (phone, at most 10 W)" in printed and "held back  by memory size" in printed
    assert "2.75 of 4 GB" in printed
    assert cli.run(["plan", "--device", "snapdragon-8-gen-3", "--model", "7b", "--memory", "lots"]) == 2
    assert "no amount of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["plan", "--device", "apple-m4"], ["simulate", "--profile", "apple-m4", "--minutes", "0.1"], ["doctor"]]
)
def test_a_terminal_of_80_columns_is_enough(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", "/x")  # a path of a word cannot be wrapped, so a short one
    monkeypatch.setenv("COLUMNS", "80")
    model = [] if arguments == ["doctor"] else ["--model", "8b", "--draft", "600m"]
    assert cli.run([*arguments, *model]) == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.run([*arguments, *model]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    if model:  # what the doctor finds differs by machine and moment
        assert shown.split() == piped.split() and max(map(len, piped.splitlines())) > 80, "only a terminal gets wrapped lines"


def test_a_draft_that_helps_and_one_that_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    arguments = ["plan", "--device", "apple-m4-max", "--model", "8b"]

    def said(*more: str) -> str:
        assert cli.run([*arguments, *more]) == 0
        return capsys.readouterr().out

    advice = "would help a draft (--draft): checking "
    assert advice in said()
    helps = said("--draft", "600m")
    assert advice not in helps and "tokens/s" in next(line for line in helps.splitlines() if line.startswith("  draft"))
    assert "no draft length gains anything" in said("--draft", "7b", "--acceptance", "0.1")
