# pyright: basic
"""What benchmarks share: which software and machine a figure belongs to, medians with their spread, tables, bars."""

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil
from msgspec import Struct
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
_WIDTH = 130


class Spread(Struct, frozen=True, kw_only=True):
    """The middle of some measurements, with the smallest and the largest."""

    median: float
    least: float
    most: float
    repeats: int

    def text(self, digits: int = 2) -> str:
        """`0.46 (0.44-0.51)`; a single measurement has no spread."""
        if self.repeats == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}-{self.most:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Of at least one measurement."""
    return Spread(median=statistics.median(values), least=min(values), most=max(values), repeats=len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Of at least one; the nearest that was measured."""
    ordered = sorted(values)
    return ordered[round(percent / 100 * (len(ordered) - 1))]


class Bound(Struct, frozen=True, kw_only=True):
    """What is wanted of a figure. Its median decides."""

    what: str
    got: Spread
    side: Literal["at most", "at least"]
    wanted: float
    digits: int = 2

    @property
    def holds(self) -> bool:
        return self.got.median <= self.wanted if self.side == "at most" else self.got.median >= self.wanted


def versions() -> str:
    """One line that must stand beside every figure: the same benchmark elsewhere gives others."""
    installed = [f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm")]
    memory_gb = psutil.virtual_memory().total / 1e9
    machine = f"{_cpu_name()}, {os.cpu_count()} cores, {memory_gb:.0f} GB, {platform.system()} {platform.machine()}"
    return ", ".join([f"mlxd {_own_version()}", *installed, f"Python {platform.python_version()}", machine])


def load_warning() -> str:
    """Says when others use this machine, for then seconds mean little."""
    busy = os.getloadavg()[0]
    return f"load average {busy:.1f}: not an idle machine, take no figure of this run further" if busy > 0.7 else ""


def print_head(title: str) -> None:
    """What is measured, with what, on what."""
    lines = [line for line in (title, versions(), load_warning()) if line]
    print("\n".join(lines), flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=_WIDTH, highlight=False).print(table)


def print_bounds(bounds: Sequence[Bound]) -> None:
    """Each with what came out and whether that is enough."""
    rows = [
        [
            bound.what,
            bound.got.text(bound.digits),
            f"{bound.side} {bound.wanted:.{bound.digits}f}",
            "yes" if bound.holds else "NO",
        ]
        for bound in bounds
    ]
    print_table("what is wanted, median (least-most)", ["", "got", "wanted", "holds"], rows)


def save_bars(
    path: Path, title: str, unit: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], note: str
) -> None:
    """A PNG of horizontal bars, one colour per series, each with its number. A zero draws no bar and says `-`."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 + len(groups) * (0.2 + 0.22 * len(series))), dpi=110)
    height = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [row + (number - (len(series) - 1) / 2) * height for row in range(len(groups))]
        bars = axes.barh(places, values, height * 0.9, label=name)
        axes.bar_label(bars, [f"{value:.3g}" if value else "-" for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(fontsize=8, ncols=len(series), loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.annotate(note, (0, 0), (0, -36), xycoords="axes fraction", textcoords="offset points", fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
    print(f"picture: {path}")


def save_lines(
    path: Path,
    title: str,
    across: str,
    upward: str,
    series: Mapping[str, Mapping[int, Sequence[float]]],
    note: str,
) -> None:
    """A PNG of one line per name over numbers that double, through the medians, with bars from least to most."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=120)
    ends: list[tuple[float, str, str]] = []
    for number, (name, by_place) in enumerate(series.items()):
        places = sorted(by_place)
        spreads = [spread(by_place[place]) for place in places]
        middles = [one.median for one in spreads]
        reach = [
            [one.median - one.least for one in spreads],
            [one.most - one.median for one in spreads],
        ]
        style = "--" if number == 0 else "-"
        axes.errorbar(places, middles, reach, label=name, color=f"C{number}", linestyle=style, marker="o", capsize=3)
        ends.append((middles[-1], f"{name}  {middles[-1]:.3g}", f"C{number}"))
    top = axes.get_ylim()[1]
    apart = top / 22
    at = -apart
    for end, text, colour in sorted(ends):
        at = max(end, at + apart)  # so that names do not lie on each other
        axes.annotate(text, (1.01, at / top), xycoords="axes fraction", color=colour, fontsize=8, va="center")
    axes.set_ylim(0, top)
    axes.set_xscale("log", base=2)
    every = sorted({place for by_place in series.values() for place in by_place})
    axes.set_xticks(every, [str(place) for place in every])
    axes.set_xlabel(across)
    axes.set_ylabel(upward)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.annotate(note, (0, 0), (0, -44), xycoords="axes fraction", textcoords="offset points", fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
    print(f"picture: {path}")


def _own_version() -> str:
    """The checkout's, whether it is installed or not, with its commit."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = str(tomllib.load(file)["project"]["version"])
    command = ["git", "describe", "--always", "--dirty=+"]
    described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"{version} ({described.stdout.strip()})" if described.returncode == 0 else version


def _cpu_name() -> str:
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
