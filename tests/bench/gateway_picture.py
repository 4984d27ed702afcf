# pyright: basic
"""The picture of `gateway_bench`: how late tokens are, and what a request costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "gateway.png"
POINTS = 2000


def save_gateway(
    request_ms: Mapping[str, Mapping[str, float]], late_ms: Mapping[str, Sequence[float]], note: str
) -> None:
    """`request_ms` by who answered and how, `late_ms` one per token by load."""
    from matplotlib import pyplot

    figure, (late, cost) = pyplot.subplots(1, 2, figsize=(10, 3.6), dpi=120, width_ratios=(3, 2))
    for name, values in late_ms.items():
        ordered = sorted(values)
        shares = [100 * point / POINTS for point in range(POINTS + 1)]
        late.plot([ordered[round(share / 100 * (len(ordered) - 1))] for share in shares], shares, label=name)
    late.set_xscale("log")
    late.xaxis.set_major_formatter("{x:g}")
    late.set_yticks([0, 25, 50, 75, 99], ["0 %", "25 %", "50 %", "75 %", "99 %"])
    late.set_xlabel("milliseconds after it was due")
    late.set_title("How many tokens had arrived", loc="left", fontsize=10)
    late.legend(fontsize=8, frameon=False)
    late.grid(alpha=0.3)
    height = 0.8 / len(request_ms)
    answers = list(next(iter(request_ms.values())))
    for number, (name, by_answer) in enumerate(request_ms.items()):
        places = [row + (number - (len(request_ms) - 1) / 2) * height for row in range(len(answers))]
        colour = "C0" if number == 0 else "lightgrey"
        bars = cost.barh(places, [by_answer[answer] for answer in answers], height * 0.9, label=name, color=colour)
        cost.bar_label(bars, [f"{by_answer[answer]:.2f}" for answer in answers], padding=3, fontsize=8)
    cost.set_yticks(range(len(answers)), answers)
    cost.invert_yaxis()
    cost.margins(x=0.15)
    cost.set_xlabel("milliseconds")
    cost.set_title("A request that is answered at once", loc="left", fontsize=10)
    cost.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    for axes in (late, cost):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.text(0.01, -0.03, note, fontsize=6)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, bbox_inches="tight")
    pyplot.close(figure)
    print(f"picture: {PICTURE}")
