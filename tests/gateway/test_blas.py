"""Workers on MLX's CPU build multiply with a fast BLAS; nobody else's environment is touched."""

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import blas

needs_linux_cpu_build = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("numpy") is None, reason="the Linux CPU build's own trouble"
)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mlx", "mlx-cpu"], True),
        (["mlx", "mlx_cpu"], True),
        (["mlx"], False),
        (["mlx", "mlx-cuda-13"], False),
        (["mlx", "mlx-cpu", "mlx-cuda"], False),
        ([], False),
    ],
)
def test_only_the_cpu_build_is_helped(names: list[str], expected: bool) -> None:  # noqa: FBT001 - a table's column
    """A GPU build, or both builds at once, computes elsewhere and keeps its environment."""
    assert blas.is_cpu_build(names) is expected


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, {"LD_PRELOAD": "/x.so"}),
        ({"LD_PRELOAD": "/a.so"}, {"LD_PRELOAD": "/x.so:/a.so"}),
        ({"OPENBLAS_NUM_THREADS": "1"}, {"LD_PRELOAD": "/x.so", "OPENBLAS_NUM_THREADS": "1"}),
        ({"OPENBLAS_THREAD_TIMEOUT": "20"}, {"LD_PRELOAD": "/x.so", "OPENBLAS_THREAD_TIMEOUT": "20"}),
        ({"HOME": "/h"}, {"HOME": "/h", "LD_PRELOAD": "/x.so"}),
    ],
)
def test_what_is_set_already_stays(base: dict[str, str], expected: dict[str, str]) -> None:
    """The library comes before what was preloaded, and the operator's thread count wins."""
    chosen = {"OPENBLAS_NUM_THREADS": "4", "OPENBLAS_THREAD_TIMEOUT": "14"}
    assert blas.preloading(base, "/x.so", 4) == chosen | expected


@needs_linux_cpu_build
def test_an_operators_own_blas_stands(tmp_path: Path) -> None:
    """Whoever preloads a BLAS has chosen; mlxd adds nothing and says so."""
    base = {"LD_PRELOAD": "/opt/libmyblas.so"}

    chosen = blas.worker_environment(base, tmp_path)

    assert chosen.environment == base
    assert "libmyblas" in chosen.description


@needs_linux_cpu_build
def test_a_worker_multiplies_with_the_preloaded_library(tmp_path: Path) -> None:
    """MLX in a child with that environment gives the right product, and the library is mapped into it."""
    chosen = blas.worker_environment(dict(os.environ), tmp_path)
    library = chosen.environment["LD_PRELOAD"].split(":")[0]
    program = (
        "import mlx.core as mx; a = mx.arange(12, dtype=mx.float32).reshape(3, 4); print((a @ a.T).tolist());"
        "print(open('/proc/self/maps').read())"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], env=chosen.environment, capture_output=True, text=True, check=True
    ).stdout

    assert said.startswith("[[14.0, 38.0, 62.0], [38.0, 126.0, 214.0], [62.0, 214.0, 366.0]]")
    assert Path(library).name in said
    assert "OpenBLAS" in chosen.description


@needs_linux_cpu_build
def test_the_shim_is_built_once(tmp_path: Path) -> None:
    """A second start compiles nothing and leaves one private file."""
    first, _ = blas._numpy_library_shim(tmp_path)
    built = Path(first).stat().st_mtime_ns
    second, _ = blas._numpy_library_shim(tmp_path)

    assert (second, Path(second).stat().st_mtime_ns) == (first, built)
    assert [path.name for path in tmp_path.iterdir()] == [Path(first).name]
    assert Path(first).stat().st_mode & 0o777 == 0o600


@needs_linux_cpu_build
def test_a_library_that_is_none_is_not_preloaded(tmp_path: Path) -> None:
    """A broken file is found out in a child, never in a worker."""
    broken = tmp_path / "libopenblas.so.0"
    broken.write_bytes(b"\x7fELF but no more")

    with pytest.raises(blas.BlasUnavailable):
        blas._check(str(broken), dict(os.environ))


@needs_linux_cpu_build
def test_without_any_fast_blas_the_environment_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow is better than not at all, and the description says what to install."""
    monkeypatch.setattr(blas, "_SYSTEM_DIRECTORIES", ())
    monkeypatch.setattr(blas, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(blas.ctypes.util, "find_library", lambda _name: None)
    base = {"PATH": "/usr/bin"}

    chosen = blas.worker_environment(base, tmp_path)

    assert chosen.environment == base
    assert "libopenblas0" in chosen.description


FEW_ROWS_PROGRAM = """
import ctypes, sys, threading
import numpy as np
multiply = ctypes.CDLL(None).cblas_sgemm
multiply.restype = None
multiply.argtypes = [ctypes.c_int] * 6 + [ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
    ctypes.c_float, ctypes.c_void_p, ctypes.c_int]

def differs(rows, columns, depth, seed):
    draw = np.random.default_rng(seed)
    a, b = (draw.standard_normal((n, depth + 3), np.float32)[:, :depth] for n in (rows, columns))  # rows lie apart
    c = np.full((rows + 1, columns + 5), 7, np.float32)
    multiply(101, 111, 112, rows, columns, depth, 1.0, a.ctypes.data, depth + 3, b.ctypes.data, depth + 3,
        0.0, c.ctypes.data, columns + 5)
    around = np.concatenate([c[:rows, columns:].ravel(), c[rows]])
    is_right = np.allclose(c[:rows, :columns], a.astype(float) @ b.T.astype(float), atol=1e-3)
    return [] if is_right and (around == 7).all() else [(rows, columns, depth)]

def all_shapes(seed):
    for rows in [*range(1, 67), 96, 127, 128, 129]:
        wrong.extend(differs(rows, (32, 60, 100, 576)[rows % 4], (256, 272, 576, 257)[rows // 2 % 4], seed))
    for columns, depth in [(33, 512), (28, 512), (64, 255), (4096, 1536)]:
        wrong.extend(differs(7, columns, depth, seed))

wrong = []
threads = [threading.Thread(target=all_shapes, args=(seed,)) for seed in range(int(sys.argv[1]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong)
"""


@needs_linux_cpu_build
@pytest.mark.parametrize("threads", ["1", "2", "5"])
@pytest.mark.parametrize("callers", ["1", "3"])
def test_products_of_few_rows_are_right(threads: str, callers: str, tmp_path: Path) -> None:
    """For every number of rows on both sides of the bound, for columns and depths that fit its tiles and that do not,
    alone and when several threads multiply at once; and nothing is written beside the result."""
    chosen = blas.worker_environment({**os.environ, "OPENBLAS_NUM_THREADS": threads}, tmp_path)

    said = subprocess.run(
        [sys.executable, "-c", FEW_ROWS_PROGRAM, callers],
        env=chosen.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert said == "[]\n"


@needs_linux_cpu_build
def test_few_rows_are_our_own_where_the_processor_allows(tmp_path: Path) -> None:
    """They are compiled in, or the products would be right and slow."""
    if platform.machine() != "x86_64" or " fma " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs x86-64 with FMA")
    shim, _ = blas._numpy_library_shim(tmp_path)

    assert b"pthread_cond_broadcast" in Path(shim).read_bytes()  # to wake those that help: nothing else needs it


@needs_linux_cpu_build
@pytest.mark.parametrize("flags", [("-march=x86-64",), ("-march=haswell",)])
def test_older_processors_get_what_they_can_run(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without AVX-512 tiles are smaller, without FMA everything goes to OpenBLAS: the products are right even so."""
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs a processor that runs all of them")
    monkeypatch.setattr(blas, "_OPTIMIZE", ("-O2", *flags))
    test_products_of_few_rows_are_right("2", "2", tmp_path)
