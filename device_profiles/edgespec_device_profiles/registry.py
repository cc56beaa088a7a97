"""The chips that have a file, and which of them this machine has.

Every question to the system goes through a `Probe`, so that tests can answer in its place.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from edgespec.core.device import DeviceProfile
from edgespec.core.errors import ArtifactError
from edgespec_device_profiles.chips import Chip, parse


def names() -> list[str]:
    """Every chip that has a file, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _data().iterdir() if entry.name.endswith(".toml"))


def load(name: str) -> Chip:
    """The chip of that file name, e.g. "apple-m4". ArtifactError lists near names."""
    wanted = name.strip().lower().replace(" ", "-")
    if wanted not in names():
        raise ArtifactError(f"no chip file named {name!r}; known: {', '.join(_near(wanted))}")
    return parse((_data() / f"{wanted}.toml").read_text(encoding="utf-8"), origin=f"{wanted}.toml")


def identify(reported: str) -> Chip | None:
    """The chip whose name or model code occurs in what a system reports; the longest one ("Apple M4 Max" before "Apple M4")."""
    words = f" {_plain(reported)} "
    best: tuple[int, Chip] | None = None
    for chip in _all():
        for name in chip.match:
            if f" {_plain(name)} " in words and (best is None or len(name) > best[0]):
                best = (len(name), chip)
    return best[1] if best else None


@lru_cache(maxsize=1)
def _all() -> tuple[Chip, ...]:
    return tuple(map(load, names()))


def _plain(text: str) -> str:
    text = text.lower().replace("(r)", " ").replace("(tm)", " ").replace("®", " ").replace("™", " ")
    return " ".join("".join(c if c.isalnum() else " " for c in text).split())


def _near(wanted: str) -> list[str]:
    family = wanted.split("-")[0]
    return [name for name in names() if name.startswith(family)] or names()


def _data() -> Any:  # a Traversable, whose type moves between Python versions
    return files("edgespec_device_profiles") / "data"


class Probe(Protocol):
    """Answers about the system; None means that there is no answer, never an exception."""

    def system(self) -> str: ...
    def run(self, command: Sequence[str]) -> str | None: ...
    def read(self, path: str) -> str | None: ...


class LocalProbe:
    def system(self) -> str:
        return platform.system()

    def run(self, command: Sequence[str]) -> str | None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """`reported`: the processor's name as the system gives it, "" if it gives none. `chip`: its file, if there is one."""

    os: str
    reported: str
    memory_bytes: int | None
    chip: Chip | None

    def profile(self) -> DeviceProfile:
        """Published priors of a known chip; otherwise a profile in which nothing is assumed."""
        if self.chip is not None:
            return self.chip.device(os=self.os, memory_bytes=self.memory_bytes)
        return DeviceProfile(
            chip=self.reported or "unknown", os=self.os, memory_bytes=self.memory_bytes, provenance="no chip file: nothing measured"
        )


def detect(probe: Probe | None = None) -> Detected:
    """This machine. What cannot be found out stays empty; nothing is guessed and nothing raises."""
    probe = probe or LocalProbe()
    system = probe.system()
    reader = {"Darwin": _macos, "Windows": _windows, "Linux": _linux, "Android": _android}.get(system)
    if reader is None:
        return Detected(os=system, reported="", memory_bytes=None, chip=None)
    if reader is _linux and probe.run(["getprop", "ro.build.version.release"]):
        reader = _android
    os, reported, memory = reader(probe)
    return Detected(os=os, reported=reported, memory_bytes=memory, chip=identify(reported) if reported else None)


@lru_cache(maxsize=1)
def detected() -> Detected:
    """This machine, asked once per process: some systems take a second to answer."""
    return detect()


_Facts = tuple[str, str, int | None]  # (os, reported chip, memory bytes)


def _macos(probe: Probe) -> _Facts:
    version = probe.run(["sw_vers", "-productVersion"]) or ""
    brand = probe.run(["sysctl", "-n", "machdep.cpu.brand_string"]) or ""
    return f"macOS {version}".strip(), brand, _integer(probe.run(["sysctl", "-n", "hw.memsize"]))


def _linux(probe: Probe) -> _Facts:
    cpu = _field(probe.read("/proc/cpuinfo"), "model name", "Hardware")
    if not cpu:  # ARM boards describe themselves here
        cpu = (probe.read("/proc/device-tree/model") or "").strip("\0 \n")
    return "Linux", cpu, _meminfo(probe)


def _android(probe: Probe) -> _Facts:
    """Termux: properties, because /proc/cpuinfo names no chip there."""
    release = probe.run(["getprop", "ro.build.version.release"]) or ""
    parts = (probe.run(["getprop", key]) or "" for key in ("ro.soc.manufacturer", "ro.soc.model", "ro.board.platform"))
    return f"Android {release}".strip(), " ".join(part for part in parts if part), _meminfo(probe)


def _windows(probe: Probe) -> _Facts:
    key = r"HKLM\HARDWARE\DESCRIPTION\System\CentralProcessor\0"
    answer = probe.run(["reg", "query", key, "/v", "ProcessorNameString"]) or ""
    _, found, brand = answer.partition("REG_SZ")
    memory = probe.run(["powershell", "-NoProfile", "-Command", "(Get-CimInstance Win32_ComputerSystem).TotalPhysicalMemory"])
    return "Windows", brand.strip() if found else "", _integer(memory)


def _meminfo(probe: Probe) -> int | None:
    kib = _integer(_field(probe.read("/proc/meminfo"), "MemTotal").removesuffix("kB"))
    return None if kib is None else kib * 1024


def _field(text: str | None, *keys: str) -> str:
    """The first `key : value` line's value, trying the keys in turn."""
    for key in keys:
        for line in (text or "").splitlines():
            name, colon, value = line.partition(":")
            if colon and name.strip() == key:
                return value.strip()
    return ""


def _integer(text: str | None) -> int | None:
    stripped = (text or "").strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() else None
