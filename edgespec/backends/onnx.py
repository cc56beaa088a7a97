"""ONNX Runtime as a backend: finding it, loading an artifact, choosing threads. The engine itself is in `onnx_engine`."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from edgespec.backends.onnx_engine import OnnxEngine, input_names, library_errors
from edgespec.core.errors import ArtifactError, CapabilityError
from edgespec.core.manifest import Artifact, Manifest

_GRAPH_FILE = "model.onnx"
_OLDEST = (1, 32)  # GroupQueryAttention with query_seqlens
_ERRORS_ONLY = 3  # log level


class OnnxBackend:
    name = "onnx"
    artifact_engines = ("onnx",)

    def why_not(self) -> str | None:
        if find_spec("onnxruntime") is None:
            return "onnxruntime is not installed; run: pip install onnxruntime"
        try:
            onnxruntime = import_quietly()
        except ImportError as error:
            return f"onnxruntime does not load here: {error}"
        version: str = onnxruntime.__version__
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            return f"onnxruntime {version} is too old; run: pip install -U 'onnxruntime>={_OLDEST[0]}.{_OLDEST[1]}'"
        return None

    def describe(self) -> str:
        """One line for `doctor`; needs `why_not()` to be None."""
        onnxruntime = import_quietly()
        return f"ONNX Runtime {onnxruntime.__version__}, CPU, {default_threads()} threads"

    def load(self, package: Path, manifest: Manifest, artifact: Artifact, *, threads: int | None = None) -> OnnxEngine:
        if reason := self.why_not():
            raise CapabilityError(reason)
        onnxruntime = import_quietly()
        path = package / artifact.folder / _GRAPH_FILE

        def open_session(profile: Path | None = None) -> Any:
            """`profile`: how the name of the file begins into which the session writes what it did where."""
            _check_files(package, manifest, artifact)
            options: Any = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads or default_threads()
            options.log_severity_level = _ERRORS_ONLY
            # Idle workers spin for the next operator within a pass, which the small ones need; between passes they must not take
            # the processor from a draft engine or from Python.
            options.add_session_config_entry("session.force_spinning_stop", "1")
            if profile is not None:
                options.enable_profiling, options.profile_file_prefix = True, str(profile)
                options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            try:
                session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            except library_errors() as error:
                raise ArtifactError(f"ONNX Runtime cannot load {path}: {error}; convert or pull {manifest.name} again") from error
            _forget_pages(path.parent)
            return session

        session = open_session()
        found = {value.name for value in session.get_inputs()}
        if found != input_names(manifest.decoder):
            raise ArtifactError(f"{path} was written by another version of edgespec; run: edgespec pull {manifest.name} --force")
        return OnnxEngine(
            session,
            onnxruntime,
            manifest.spec(artifact),
            manifest.decoder,
            width_invariant=artifact.width_invariant,
            open_profiled=open_session,
        )


BACKEND = OnnxBackend()


def import_quietly() -> Any:
    """The library with its telemetry off. It reads the variable once, when it is loaded: its own switch comes too late."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    onnxruntime.disable_telemetry_events()  # for a program that had loaded it before us
    return onnxruntime


def default_threads() -> int:
    """Physical cores this process may use: hyper-threads only take turns in the same arithmetic units."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


def _check_files(package: Path, manifest: Manifest, artifact: Artifact) -> None:
    """The library would map a file that was cut short and crash on the first touch of what is missing."""
    for name, record in artifact.files.items():
        path = package / name
        found = path.stat().st_size if path.is_file() else None
        if found != record.nbytes:
            what = "is missing" if found is None else f"has {found} bytes instead of {record.nbytes}"
            raise ArtifactError(f"{path} {what}; convert or pull {manifest.name} again")


def _forget_pages(folder: Path) -> None:
    """Give back the memory that loading has touched in the mapped files of `folder` (Linux only, elsewhere nothing happens).

    The library repacks the weights into memory of its own, yet keeps the scales mapped without reading them again.
    """
    if sys.platform != "linux":
        return
    dont_need = 4  # MADV_DONTNEED
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _clean_mappings(folder):
        madvise(start, end - start, dont_need)


def _clean_mappings(folder: Path) -> Iterator[tuple[int, int]]:
    """Address ranges of this process that show files of `folder` as they are on disk."""
    with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as lines:
        found = None
        for line in lines:
            if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +(/.*)", line):
                inside = Path(header[3].rstrip("\n")).parent == folder.resolve()
                found = (int(header[1], 16), int(header[2], 16)) if inside else None
            elif found and line.startswith("Anonymous:") and int(line.split()[1]) == 0:  # no page was written to
                yield found
