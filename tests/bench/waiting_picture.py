# pyright: basic
"""The picture of `waiting_bench`: every piece of a stream beside a long prompt, and interactive waits."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

PICTURE = Path(__file__).parent / "pictures" / "waiting.png"
BEFORE_SECONDS = 3.0
AFTER_SECONDS = 3.0


class Raster(Struct, frozen=True, kw_only=True):
    """One server's stream: when its pieces came, and the prompt's first token, in seconds from the prompt's arrival.
    The longest gap is of those that overlap that time."""

    name: str
    pieces: tuple[float, ...]
    prompt_seconds: float
    longest_gap_seconds: float


def save_waiting(
    rasters: Mapping[int, Sequence[Raster]],
    first_tokens: Mapping[str, Sequence[float]],
    gaps: Mapping[str, Sequence[float]],
    note: str,
) -> None:
    """One row of axes per prompt size, and one for what interactive requests wait beside batch work."""
    from matplotlib import pyplot

    heights = [*(0.6 * len(many) + 0.3 for many in rasters.values()), 1.25]
    figure, rows = pyplot.subplots(
        len(heights), 1, figsize=(9.5, sum(heights) + 0.75 * len(heights)), dpi=120, height_ratios=heights
    )
    for axes, (size, many) in zip(rows, rasters.items(), strict=False):
        _draw_rasters(axes, size, many)
    last = rows[-1].get_subplotspec()
    rows[-1].remove()
    inner = last.subgridspec(1, 2, wspace=0.3)
    _draw_waits(figure.add_subplot(inner[0]), first_tokens, "to the first token of an interactive question, s")
    _draw_waits(figure.add_subplot(inner[1]), gaps, "between its tokens, s")
    figure.tight_layout(h_pad=1.2)
    figure.text(0.01, -0.01, note, fontsize=6)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, bbox_inches="tight")
    pyplot.close(figure)
    print(f"picture: {PICTURE}")


def _draw_rasters(axes, size: int, many: Sequence[Raster]) -> None:
    end = max(raster.prompt_seconds for raster in many) + AFTER_SECONDS
    labels: list[str] = []
    for row, raster in enumerate(many):
        colour = f"C{row}"
        axes.barh(row, raster.prompt_seconds, 0.8, color=colour, alpha=0.15)
        pieces = [at for at in raster.pieces if -BEFORE_SECONDS <= at <= end]
        axes.eventplot(pieces, lineoffsets=row, linelengths=0.55, linewidths=0.6, colors=colour)
        answered = f"answered after {raster.prompt_seconds:.0f} s"
        labels.append(f"{raster.name}\n{answered}\nlongest gap {raster.longest_gap_seconds:.2g} s")
    axes.set_yticks(range(len(many)), labels)
    axes.set_xlim(-BEFORE_SECONDS, end)
    axes.set_ylim(len(many) - 0.45, -0.6)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("seconds from the prompt's arrival; shaded until its first token", fontsize=8)
    title = f"Each tick is a piece of a stream that is being read while a prompt of {size:,} tokens comes"
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _draw_waits(axes, by_name: Mapping[str, Sequence[float]], title: str) -> None:
    for row, (name, values) in enumerate(by_name.items()):
        ordered = sorted(values)
        shares = [(number + 1) / len(ordered) for number in range(len(ordered))]
        axes.step([ordered[0], *ordered], [0.0, *shares], where="post", label=name, color=f"C{row}")
    axes.axhline(0.95, color="grey", linewidth=0.5, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_yticks([0.0, 0.5, 0.95], ["0 %", "50 %", "95 %"])
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
