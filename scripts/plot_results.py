"""Draws files of benchmarks/results into PNGs beside them: all that it knows, or those that are named."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from render_results import FOLDER

COLORS = {
    "all on": "#1b6ca8", "automatic + shared-prefix tiles": "#1b6ca8", "automatic": "#5fa8d3",
    "prefix_pos declared": "#a3cfe6", "cache off": "#d1495b", "limit": "#9a9a9a", "goal": "#2e2e2e",
}  # fmt: skip
STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e6e6e6", "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "legend.frameon": False,
}  # fmt: skip
PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}")
VOID = re.compile(r" \(void: .*\)$")


class Rows:
    """A file's rows by name, a ratio's verdict taken off it."""

    def __init__(self, rows: Iterable[dict]):
        self.rows = {VOID.sub("", row["what"]): row for row in rows}

    def by_model(self) -> dict[str, "Rows"]:
        """The rows of each model, whose name is what comes before the first comma."""
        models = dict.fromkeys(what.partition(", ")[0] for what in self.rows)
        return {name: Rows(r for what, r in self.rows.items() if what.startswith(f"{name}, ")) for name in models}

    def matching(self, pattern: str) -> list[tuple[re.Match, dict]]:
        found = ((re.fullmatch(pattern, what), row) for what, row in self.rows.items())
        return [(match, row) for match, row in found if match]

    def value(self, what: str) -> float | None:
        return self.rows[what]["value"] if what in self.rows else None

    def lines(self, pattern: str) -> dict[str, list[tuple[float, float]]]:
        """Points (x, value) by group `line`, sorted; the pattern has groups `x` and `line`."""
        found: dict[str, list[tuple[float, float]]] = {}
        for match, row in self.matching(pattern):
            found.setdefault(match["line"], []).append((float(match["x"]), row["value"]))
        return {name: sorted(points) for name, points in found.items()}


def draw(path: Path) -> Path | None:
    """The picture of one file, or None if there is nothing to draw."""
    content = json.loads(path.read_text(encoding="utf-8"))
    with plt.rc_context(STYLE):
        panels = [panel for panel in PANELS[path.stem](Rows(content["rows"])) if panel is not None]
        if not panels:
            return None
        columns = len(panels) if len(panels) <= 3 else 2
        rows = -(-len(panels) // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(6.6 * columns, 4.2 * rows), layout="constrained", squeeze=False
        )
        for axis, panel in zip(axes.flat, panels, strict=False):
            panel(axis)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        figure.suptitle(
            f"{content['device']}, JAX {content['versions'].get('jax', '?')}, {content['date']}", fontsize=9
        )
        figure.savefig(path.with_suffix(".png"), dpi=120)
        plt.close(figure)
    return path.with_suffix(".png")


Panel = Callable[[Axes], None]


def line_panel(
    lines: dict[str, list[tuple[float, float]]], title: str, x: str, y: str, *, log: bool = False, unit: bool = False
) -> Panel | None:
    """unit: a line where nothing is gained or lost."""
    if not lines:
        return None

    def panel(axes: Axes) -> None:
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name, color=COLORS.get(name))
        axes.set(title=title, xlabel=x, ylabel=y)
        if log:
            ticks = sorted({point[0] for points in lines.values() for point in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        if unit:
            axes.axhline(1, color=COLORS["limit"], linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PLAIN)
        if len(lines) > 1:
            axes.legend()

    return panel


def bar_panel(
    bars: Sequence[tuple[str, dict[str, float | None]]], title: str, x: str, fmt: str = "{:,.0f}"
) -> Panel | None:
    """Horizontal bars: what it is called; and "value", and where known its "limit", "must" and "expected"."""
    if not bars:
        return None

    def panel(axes: Axes) -> None:
        for place, (name, numbers) in enumerate(bars):
            if limit := numbers.get("limit"):
                axes.barh(place, limit, height=0.7, color="#efefef", edgecolor=COLORS["limit"], linewidth=0.8)
            axes.barh(
                place,
                numbers["value"],
                height=0.45,
                color=COLORS.get(name.rpartition(", ")[2].replace("\n", " "), COLORS["all on"]),
            )
            if mark := numbers.get("must") or numbers.get("expected"):
                axes.plot([mark, mark], [place - 0.38, place + 0.38], color=COLORS["goal"], linewidth=2)
            axes.text(
                max(numbers["value"], mark or 0), place, "  " + fmt.format(numbers["value"]), va="center", fontsize=8
            )
        axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
        axes.invert_yaxis()
        axes.set(title=title, xlabel=x)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(PLAIN)
        axes.grid(axis="y", visible=False)

    return panel


def kernel_panels(rows: Rows) -> list[Panel | None]:
    plain = rows.lines(r"plain decode attention (?P<line>\d+) x (?P<x>\d+), GQA 32/8 / copy bandwidth")
    plain = {f"B = {batch}": plain[batch] for batch in sorted(plain, key=int)}
    shared = rows.lines(r"shared ÷ plain, B = 256, own 128, prefix (?P<x>\d+), (?P<line>GQA-4|MHA)")
    return [
        line_panel(
            plain, "plain decode attention, GQA 32/8", "context", "share of the copy bandwidth", log=True, unit=True
        ),
        line_panel(
            shared, "256 sequences, 128 positions each", "shared prefix", "plain ÷ shared tiles", log=True, unit=True
        ),
    ]


def throughput_panels(rows: Rows) -> list[Panel | None]:
    """Each model's speeds, in the outline of their rooflines, with what they must reach."""
    bars: dict[str, list] = {}
    for what, row in rows.rows.items():
        if row["unit"] == "output tokens/s":
            model, _, name = what.partition(", ")
            share = rows.value(f"{what}: share of its roofline")
            limit = row["value"] / share if share else None
            bars.setdefault(model, []).append(
                (wrap(name), {"value": row["value"], "limit": limit, "must": row["must"]})
            )
    label = "output tokens/s (outline: roofline; mark: must)"
    return [bar_panel(found, model, label) for model, found in bars.items()]


def titled(model: str, panels: Sequence[Panel | None]) -> list[Panel]:
    """The panels that there are, each with its model's name."""

    def name(panel: Panel) -> Panel:
        def draw_named(axes: Axes) -> None:
            panel(axes)
            axes.set_title(f"{model}: {axes.get_title()}")

        return draw_named

    return [name(panel) for panel in panels if panel is not None]


def prefix_caching_panels(rows: Rows) -> list[Panel]:
    return [panel for model, own in rows.by_model().items() for panel in titled(model, caching_panels_of(own))]


def caching_panels_of(rows: Rows) -> list[Panel | None]:
    hits = rows.lines(r".*, (?P<x>\d+)% hits \(.*\), \d+ requests, (?P<line>all on|cache off)")
    gains = {
        "measured": rows.lines(r"(?P<line>.*), (?P<x>\d+)% hits \(.*\), \d+ requests: all on ÷ cache off"),
        "roofline": rows.lines(r"(?P<line>.*), (?P<x>\d+)% hits \(.*\), \d+ requests: roofline's gain"),
    }
    gains = {name: next(iter(found.values())) for name, found in gains.items() if found}
    arms = "|".join(
        map(re.escape, ("cache off", "prefix_pos declared", "automatic + shared-prefix tiles", "automatic"))
    )
    prefixes = rows.lines(rf".*, prefix length: \d+ x \((?P<x>\d+) shared .*out, (?P<line>{arms})")
    batches = rows.lines(rf".*, batch: (?P<x>\d+) x \(.*out, (?P<line>{arms})")
    bars = [
        (match["arm"], {"value": row["value"]})
        for match, row in rows.matching(rf"[^:]*out, (?P<arm>{arms})")
        if row["unit"] == "output tokens/s"
    ]
    policies = rows.matching(r".*1/4 of the pages, (?P<name>\w+ \+ \w+): hit rate")
    ideal = next((row["value"] for _, row in rows.matching(r".*: hit rate without limit")), None)
    texts = []
    for match, row in rows.matching(r"[^,]+, (?P<dtype>\w+), (?P<name>.+): hit rate"):
        expected = rows.value(f"{match.group()} expected from the ids")
        texts.append((wrap(match["name"]), {"value": row["value"], "expected": expected}))
    shares = "share of prompt tokens (mark: expected from the ids)"
    return [
        line_panel(hits, "speed over the hit rate", "hits, %", "output tokens/s"),
        line_panel(gains, "gain over the hit rate", "hits, %", "all on ÷ cache off", unit=True),
        bar_panel(bars, "arms", "output tokens/s"),
        line_panel(prefixes, "length of the shared prefix", "tokens", "output tokens/s", log=True),
        line_panel(batches, "requests that share it", "requests", "output tokens/s", log=True),
        bar_panel(
            [(match["name"], {"value": row["value"], "expected": ideal}) for match, row in policies],
            "hits in a quarter of the pages", "share of prompt tokens (mark: without limit)", "{:.1%}",
        ),
        bar_panel(texts, "hits in real text", shares, "{:.1%}"),
    ]  # fmt: skip


def serving_panels(rows: Rows) -> list[Panel]:
    return [panel for model, own in rows.by_model().items() for panel in titled(model, serving_panels_of(own))]


def serving_panels_of(rows: Rows) -> list[Panel | None]:
    head = r".* (?P<x>[\d.]+) requests/s, (?P<line>all on|cache off)"
    panels = []
    for name, title in (("time to first token", "time to first token"), ("time per output token", "time per token")):
        lines = {
            f"{arm}, p{percent}": points
            for percent in (50, 99)
            for arm, points in rows.lines(rf"{head}: {name}, p{percent}").items()
        }
        panels.append(percentile_panel(lines, title))
    goodput = rows.lines(rf"{head}: goodput, .*")
    limits = next((match["limits"] for match, _ in rows.matching(rf"{head}: goodput, (?P<limits>.*)")), "")
    return [*panels, line_panel(goodput, f"goodput: {limits}", "requests/s asked", "requests/s within the limits")]


def percentile_panel(lines: dict[str, list[tuple[float, float]]], title: str) -> Panel | None:
    if not lines:
        return None

    def panel(axes: Axes) -> None:
        for name, points in lines.items():
            arm, _, percentile = name.partition(", ")
            style = "-" if percentile == "p50" else ":"
            axes.plot(*zip(*points, strict=True), style, marker="o", label=name, color=COLORS[arm])
        axes.set(title=title, xlabel="requests/s asked", ylabel="ms", yscale="log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.legend()

    return panel


def peer_panels(rows: Rows) -> list[Panel | None]:
    bars: dict[str, list] = {}
    for what, row in rows.rows.items():
        if row["unit"] == "output tokens/s":
            workload, _, engine = what.rpartition(", ")
            bars.setdefault(workload, []).append((wrap(engine, 20), {"value": row["value"]}))
    return [bar_panel(found, wrap(workload, 52), "output tokens/s") for workload, found in bars.items()]


def wrap(text: str, width: int = 34) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


PANELS: dict[str, Callable[[Rows], list[Panel | None]]] = {
    "kernels": kernel_panels,
    "throughput": throughput_panels,
    "prefix_caching": prefix_caching_panels,
    "serving": serving_panels,
    "peers": peer_panels,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="default: those in benchmarks/results")
    args = parser.parse_args(argv)
    for path in args.files or [path for name in PANELS if (path := FOLDER / f"{name}.json").exists()]:
        print(draw(path) or f"nothing to draw in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
