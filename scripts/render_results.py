"""Writes benchmarks/results/NAME.json, the one form in which figures are committed. Run alone, it puts them into the
README, so that nobody types a number."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
README = FOLDER.parents[1] / "README.md"
START, END = "<!-- measured: scripts/render_results.py writes this -->", "<!-- end -->"
PACKAGES = ("prefix-jax", "jax", "jaxlib", "flax", "numpy")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value. `must` is what it has to reach and `aim` what would be fine, both None where none was set;
    `repeats` are the single measurements behind it."""

    what: str
    value: float
    unit: str
    must: float | None = None
    aim: float | None = None
    better: str = "lower"
    repeats: Sequence[float] = ()

    @classmethod
    def median(cls, what: str, repeats: Sequence[float], unit: str, **goals) -> "Figure":
        return cls(what, statistics.median(repeats), unit, repeats=repeats, **goals)

    @property
    def reached(self) -> bool:
        if self.must is None:
            return True
        return self.value >= self.must if self.better == "higher" else self.value <= self.must


def write_results(
    name: str,
    rows: Sequence[Figure],
    *,
    command: str | None = None,
    ceilings: Mapping[str, float] | None = None,
    device: str | None = None,
    folder: Path = FOLDER,
) -> bool:
    """Writes folder/NAME.json; prints the rows as a table and, last, the file's content as one line of JSON.

    `command` defaults to this process's own, `device` to the processor's name; `ceilings` are the limits measured in
    the same run, their unit in the name ("copy_gb_per_s"). True if every `must` is reached.
    """
    results = {
        "command": command or " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": device or processor_name(),
        "versions": versions(),
        "ceilings": dict(ceilings or {}),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    print(json.dumps(results))
    return all(row.reached for row in rows)


def table(rows: Sequence[Figure]) -> str:
    """The rows in Markdown."""
    lines = ["| what | value | must | aim |", "|---|---|---|---|"]
    for row in rows:
        goals = [goal_text(goal, row.better) for goal in (row.must, row.aim)]
        missed = "" if row.reached else " **(missed)**"
        lines.append(f"| {row.what} | {row.value:.4g} {row.unit}{missed} | {goals[0]} | {goals[1]} |")
    return "\n".join(lines)


def goal_text(goal: float | None, better: str) -> str:
    return "" if goal is None else f"{'≥' if better == 'higher' else '≤'} {goal:g}"


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide speed; one that is used from the checkout has none."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor_name() -> str:
    """The processor's name and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def device_name(platform: str | None = None) -> str:
    """The first device of a JAX platform, or of the one that JAX prefers."""
    device = jax.devices(platform)[0]
    return processor_name() if device.platform == "cpu" else device.device_kind


def render_readme(text: str, folder: Path = FOLDER) -> str:
    """The README with the tables of all result files between its two markers; of long ones, the rows with a goal."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    tables = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [Figure(**row) for row in content["rows"]]
        shown = rows if len(rows) <= 12 else [row for row in rows if row.must is not None]
        rest = f"\n\n{len(rows) - len(shown)} more rows are in `{path.name}`." if len(rows) > len(shown) else ""
        versions = f"JAX {content['versions'].get('jax', '?')}"
        title = f"`{content['command']}`, {content['device']}, {versions}, {content['date']}:"
        tables.append(f"{title}\n\n{table(shown)}{rest}")
    return f"{before}{START}\n{chr(10).join(f'{block}{chr(10)}' for block in tables)}{END}{after}"


if __name__ == "__main__":
    README.write_text(render_readme(README.read_text(encoding="utf-8")), encoding="utf-8")
