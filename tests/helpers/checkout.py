"""The checkout that the tests run in."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "edgespec": ROOT / "edgespec",
    "edgespec_converters": ROOT / "converters" / "edgespec_converters",
    "edgespec_device_profiles": ROOT / "device_profiles" / "edgespec_device_profiles",
    "edgespec_apps": ROOT / "apps" / "edgespec_apps",
}


def tracked_files() -> list[Path]:
    """What git tracks or would track, relative to ROOT; deleted files left out."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return sorted(Path(name) for name in set(listing.split("\0")) if name and (ROOT / name).is_file())
