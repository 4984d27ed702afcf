"""Gives workers a fast BLAS where MLX brings a slow one: the CPU build on Linux.

That build bundles the reference BLAS, which multiplies matrices some thirty times slower than OpenBLAS does: a prompt
of SmolLM2 in float32 is read at 8 tokens a second with it, at 240 with one thread of OpenBLAS. The bundled library is
linked dynamically, so another one that is preloaded answers in its place: a small one of ours, compiled once, which
does products of few rows itself (`blas_few_rows.c` says why) and hands the others to the OpenBLAS inside numpy. Workers
only get it: LD_PRELOAD is in their environment, never in the gateway's own.
"""

import ctypes.util
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil
from msgspec import Struct

_SYSTEM_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
_SYSTEM_NAME = "libopenblas.so.0"
_COMPILERS = ("cc", "gcc", "clang", "c++", "g++")  # MLX's CPU build needs a C++ compiler anyway
_COMPILE_TIMEOUT_SECONDS = 60
_OPTIMIZE = ("-O3", "-march=native") if platform.machine() == "x86_64" else ("-O2",)  # elsewhere it only passes on
_SOURCES = ("blas_few_rows.c", "blas_shim.c")
_THREAD_TIMEOUT = "14"
"""Threads of OpenBLAS spin for 2 to this cycles when they have no work. As it comes it is 26, some 25 ms: on two cores
two workers then took 6.2 s for what takes 0.7 s with a core each, and with this 0.9 s. Alone it costs nothing."""

_CHECK_TIMEOUT_SECONDS = 30


class WorkerEnvironment(Struct, frozen=True, kw_only=True):
    """What to start a worker with, and which BLAS that gives it, in words for the log and `mlxd status`."""

    environment: dict[str, str]
    description: str


class BlasUnavailable(Exception):
    """A library that cannot be used, and why."""


def worker_environment(base: Mapping[str, str], cache_directory: Path) -> WorkerEnvironment:
    """`base`, with a fast BLAS preloaded where that helps and one was found; never raises for want of one.

    A library is only preloaded after a child process has multiplied with it. An LD_PRELOAD that names a BLAS and an
    OPENBLAS_NUM_THREADS that are set already are the operator's choice and stand. May compile a file into
    `cache_directory` (about a second, once) and always waits for children: call it before serving, or in a thread.
    """
    if sys.platform != "linux":
        return WorkerEnvironment(environment=dict(base), description="the system's own")
    if not is_cpu_build(_installed_names()):
        return WorkerEnvironment(environment=dict(base), description="not used: MLX computes on the GPU")
    if "blas" in base.get("LD_PRELOAD", "").lower():
        return WorkerEnvironment(environment=dict(base), description=f"as LD_PRELOAD says: {base['LD_PRELOAD']}")
    reasons: list[str] = []
    for find in (_numpy_library_shim, _system_library):
        try:
            library, name = find(cache_directory)
            _check(library, base)
        except BlasUnavailable as why:
            reasons.append(str(why))
            continue
        environment = preloading(base, library, _thread_count())
        threads = environment["OPENBLAS_NUM_THREADS"]
        return WorkerEnvironment(environment=environment, description=f"{name}, threads: {threads}")
    return WorkerEnvironment(
        environment=dict(base),
        description=f"MLX's bundled reference BLAS, which is slow ({'; '.join(reasons)}): "
        "install OpenBLAS (Debian: libopenblas0) or a C compiler, then restart mlxd",
    )


def is_cpu_build(distribution_names: Iterable[str]) -> bool:
    """Whether MLX computes with the CPU only, judged by the names of what is installed."""
    names = {name.lower().replace("_", "-") for name in distribution_names}
    return "mlx-cpu" in names and not any(name.startswith("mlx-cuda") for name in names)


def preloading(base: Mapping[str, str], library: str, threads: int) -> dict[str, str]:
    """`base` with `library` before anything it preloads already, and `threads` threads unless it says otherwise."""
    preloaded = [library, *(word for word in (base.get("LD_PRELOAD", ""),) if word)]
    chosen = {"OPENBLAS_NUM_THREADS": str(threads), "OPENBLAS_THREAD_TIMEOUT": _THREAD_TIMEOUT}
    return {**chosen, **base, "LD_PRELOAD": ":".join(preloaded)}


# --- where one is --------------------------------------------------------------------------------------------------


def _installed_names() -> list[str]:
    return [distribution.name for distribution in importlib.metadata.distributions()]


def _thread_count() -> int:
    """All cores: workers divide them among those that are at work (`worker/blas_threads.py`)."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def _system_library(_cache_directory: Path) -> tuple[str, str]:
    for directory in _SYSTEM_DIRECTORIES:
        path = Path(directory) / _SYSTEM_NAME
        if path.is_file():
            return str(path), f"the system's OpenBLAS ({path})"
    found = ctypes.util.find_library("openblas")
    if found is None:
        raise BlasUnavailable("no OpenBLAS in the system's library directories")
    return found, f"the system's OpenBLAS ({found})"


def _numpy_library_shim(cache_directory: Path) -> tuple[str, str]:
    """The compiled shim over numpy's OpenBLAS, named by everything it was built from, so no stale one is ever used."""
    target = _numpy_openblas()
    source = b"".join(importlib.resources.files("gateway").joinpath(name).read_bytes() for name in _SOURCES)
    made_of = b"\0".join((source, os.fsencode(target), *map(str.encode, _OPTIMIZE), _processor()))
    identity = hashlib.sha256(made_of).hexdigest()[:16]
    shim = cache_directory / f"libmlxd-blas-{identity}.so"
    if not shim.is_file():
        _compile(source, target, shim)
    return str(shim), f"numpy's OpenBLAS ({target.name})"


def _processor() -> bytes:
    """What this one can do: what was compiled for another must not run here, though the directory be the same."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError as why:
        raise BlasUnavailable(f"what this processor can do is not known: {why}") from why
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _numpy_openblas() -> Path:
    specification = importlib.util.find_spec("numpy")  # finds it without importing it
    if specification is None or specification.origin is None:
        raise BlasUnavailable("numpy is not installed")
    directory = Path(specification.origin).parents[1] / "numpy.libs"
    libraries = sorted(directory.glob("libscipy_openblas64_*.so"))
    if not libraries:
        raise BlasUnavailable("this numpy brings no OpenBLAS of its own")
    return libraries[0]


# --- the shim ------------------------------------------------------------------------------------------------------


def _compile(source: bytes, target: Path, shim: Path) -> None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BlasUnavailable(f"no C compiler ({', '.join(_COMPILERS)}) to join numpy's OpenBLAS to MLX")
    try:
        shim.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".blas-", dir=shim.parent) as scratch:
            unfinished = Path(scratch) / shim.name
            command = [compiler, "-x", "c", "-shared", "-fPIC", *_OPTIMIZE, "-o", str(unfinished), "-"]
            command += ["-x", "none", str(target), f"-Wl,-rpath,{target.parent}", "-lpthread"]
            _run(command, source, None, _COMPILE_TIMEOUT_SECONDS)
            unfinished.chmod(0o600)
            unfinished.rename(shim)  # whole or not at all, even when two services start at once
    except OSError as why:
        raise BlasUnavailable(f"{shim.parent} cannot hold a compiled file: {why}") from why


_CHECK_PROGRAM = """
import ctypes
multiply = ctypes.CDLL(None).cblas_sgemm
multiply.restype = None
integer, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.POINTER(ctypes.c_float)
multiply.argtypes = [integer] * 6 + [real, pointer, integer, pointer, integer, real, pointer, integer]
a = (real * 6)(1, 2, 3, 4, 5, 6)                # 2 x 3, by rows
b = (real * 6)(7, 9, 11, 8, 10, 12)             # 3 x 2, given transposed
c = (real * 4)(1, 1, 1, 1)
multiply(101, 111, 112, 2, 2, 3, 2.0, a, 3, b, 3, 1.0, c, 2)
assert list(c) == [117.0, 129.0, 279.0, 309.0], list(c)
x, w, y = (real * 512)(*range(512)), (real * (256 * 64))(*[1] * 256 * 32, *[2] * 256 * 32), (real * 128)()
multiply(101, 111, 112, 2, 64, 256, 1.0, x, 256, w, 256, 0.0, y, 64)
wanted = [sum * times for sum in (32640.0, 98176.0) for times in [1] * 32 + [2] * 32]
assert list(y) == wanted, list(y)
"""
"""2 x A x B + C with a transposed factor: wrong integer sizes, enums or row lengths do not survive it. Then a product
of few rows, as models ask for it."""


def _check(library: str, base: Mapping[str, str]) -> None:
    """Multiply in a child with the library preloaded. ld.so only warns of a bad LD_PRELOAD: then the symbol lacks."""
    command = [sys.executable, "-I", "-c", _CHECK_PROGRAM]
    _run(command, b"", preloading(base, library, 1), _CHECK_TIMEOUT_SECONDS)


def _run(command: list[str], given: bytes, environment: dict[str, str] | None, timeout_seconds: float) -> None:
    try:
        ended = subprocess.run(
            command, input=given, env=environment, capture_output=True, timeout=timeout_seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as why:
        raise BlasUnavailable(f"{Path(command[0]).name} did not run: {why}") from why
    if ended.returncode != 0:
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        raise BlasUnavailable(f"{Path(command[0]).name} ended with {ended.returncode}: {said[-1] if said else ''}")
