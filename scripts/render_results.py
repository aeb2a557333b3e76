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
SCALING_START, SCALING_END = "<!-- scaling: scripts/render_results.py writes this -->", "<!-- end of scaling -->"
PACKAGES = ("prefix-jax", "jax", "jaxlib", "flax", "numpy")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value. `must` is what it has to reach and `aim` what would be fine, both None where none was set;
    `repeats` are the single measurements behind it; `on` is the machine, where it is not the file's."""

    what: str
    value: float
    unit: str
    must: float | None = None
    aim: float | None = None
    better: str = "lower"
    repeats: Sequence[float] = ()
    on: str = ""

    @classmethod
    def median(cls, what: str, repeats: Sequence[float], unit: str, **goals) -> "Figure":
        return cls(what, statistics.median(repeats), unit, repeats=repeats, **goals)

    @property
    def reached(self) -> bool:
        if self.must is None:
            return True
        return self.value >= self.must if self.better == "higher" else self.value <= self.must


class Results:
    """folder/NAME.json, written anew with every row, so that a run that is cut off keeps what it measured.

    `command` defaults to this process's own, `device` to the processor's name; `ceilings` are the limits measured in
    the same run, their unit in the name ("copy_gb_per_s"). keep: rows that the file has from another command or another
    machine stay, unless a new one has their name.
    """

    def __init__(
        self,
        name: str,
        *,
        command: str | None = None,
        ceilings: Mapping[str, float] | None = None,
        device: str | None = None,
        folder: Path = FOLDER,
        keep: bool = False,
    ):
        self.path = folder / f"{name}.json"
        self.rows: list[Figure] = []
        self.head = {
            "command": command or own_command(),
            "date": datetime.date.today().isoformat(),
            "device": device or processor_name(),
            "versions": versions(),
            "ceilings": dict(ceilings or {}),
        }
        self.kept: list[Figure] = self._take_over() if keep and self.path.exists() else []

    def _take_over(self) -> list["Figure"]:
        content = json.loads(self.path.read_text(encoding="utf-8"))
        former, this = (f"{c['device']}, JAX {c['versions'].get('jax', '?')}" for c in (content, self.head))
        commands = content["command"].split(" && ")
        self.head["command"] = " && ".join([*(c for c in commands if c != self.head["command"]), self.head["command"]])
        elsewhere = "" if former == this else former
        rows = [Figure(**{"on": elsewhere} | row) for row in content["rows"]]
        return [
            dataclasses.replace(row, on="" if (row.on or elsewhere) == this else row.on or elsewhere) for row in rows
        ]

    def add(self, *rows: "Figure") -> None:
        """Prints the rows and writes the file with them. An old profile goes with the row that it explains, and with
        any row of a new one: its rows have names of kernels."""
        self.rows += rows
        names = {row.what for row in self.rows}
        measured = names | {_profile_of(name) for name in names} - {""}
        self.kept = [row for row in self.kept if row.what not in names and _profile_of(row.what) not in measured]
        for row in rows:
            print(table_row(row), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self.path)

    @property
    def content(self) -> dict:
        rows = map(dataclasses.asdict, [*self.kept, *self.rows])
        return {
            **self.head,
            "rows": [row if row["on"] else {k: v for k, v in row.items() if k != "on"} for row in rows],
        }

    def close(self) -> bool:
        """Prints, last, the file's content as one line of JSON. True if every `must` of this run is reached."""
        print(json.dumps(self.content), flush=True)
        return all(row.reached for row in self.rows)


def _profile_of(what: str) -> str:
    head, found, _ = what.partition(": profile, ")
    return head if found else ""


def write_results(name: str, rows: Sequence[Figure], **options) -> bool:
    """All rows at once: prints them as a table and writes them as `Results` does. True if every `must` is reached."""
    results = Results(name, **options)
    print(TABLE_HEAD)
    results.add(*rows)
    return results.close()


def own_command(script: str | None = None, arguments: Sequence[str] | None = None) -> str:
    """This process's, or of a script, as it can be typed in the checkout: of absolute paths, the last part."""
    script, arguments = script or sys.argv[0], sys.argv[1:] if arguments is None else arguments
    return " ".join(
        ["python", f"scripts/{Path(script).name}", *(Path(a).name if a[0:1] == "/" else a for a in arguments)]
    )


TABLE_HEAD = "| what | value | must | aim |\n|---|---|---|---|"


def table(rows: Sequence[Figure]) -> str:
    """The rows in Markdown."""
    return "\n".join([TABLE_HEAD, *map(table_row, rows)])


def table_row(row: Figure) -> str:
    goals = [goal_text(goal, row.better) for goal in (row.must, row.aim)]
    missed = "" if row.reached else " **(missed)**"
    what = row.what + (f" ({row.on})" if row.on else "")
    return f"| {what} | {row.value:.4g} {row.unit}{missed} | {goals[0]} | {goals[1]} |"


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
    """The README with the tables and pictures of all result files between its two markers; of long ones, the rows with
    a goal."""
    if (two := folder / "two_gpus.json").exists():
        text = _between(text, SCALING_START, SCALING_END, scaling_sentence(json.loads(two.read_text(encoding="utf-8"))))
    tables = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [Figure(**row) for row in content["rows"]]
        shown = rows if len(rows) <= 12 else [row for row in rows if row.must is not None]
        rest = f"\n\n{len(rows) - len(shown)} more rows are in `{path.name}`." if len(rows) > len(shown) else ""
        versions = f"JAX {content['versions'].get('jax', '?')}"
        title = f"`{content['command']}`, {content['device']}, {versions}, {content['date']}:"
        picture = f"\n\n![{path.stem}](benchmarks/results/{path.stem}.png)" if path.with_suffix(".png").exists() else ""
        tables.append(f"{title}\n\n{table(shown)}{rest}{picture}")
    return _between(text, START, END, "\n".join(f"{block}\n" for block in tables))


def scaling_sentence(content: Mapping) -> str:
    """How many times as fast two devices are as one, of each model that ran on both; of the others, how long a step
    takes."""
    gains: dict[str, list[str]] = {}
    times: dict[str, list[str]] = {}
    for row in content["rows"]:
        what, is_gain, _ = row["what"].partition(": times as fast on two GPUs")
        model, _, work = what.partition(", " if is_gain else " on 2 devices: ")
        if work == "decode step, B = 64" or (work.startswith("prefill") and work.endswith("tokens")):
            into, text = (gains, f"{row['value']:.2f}") if is_gain else (times, f"{row['value']:.4g} {row['unit']}")
            into.setdefault(model, []).append(f"{text} ({work})")
    alone = {model: of_model for model, of_model in times.items() if model not in gains}
    parts = []
    for title, found in (("Times as fast as one", gains), ("Only on two", alone)):
        models = "; ".join(f"{model} {', '.join(of_model)}" for model, of_model in sorted(found.items()))
        parts += [f"{title}: {models}."] if found else []
    return f"{content['device']}. {' '.join(parts)}\n"


def _between(text: str, start: str, end: str, new: str) -> str:
    """The text with `new` between its two markers; as it is where it has none."""
    before, found, rest = text.partition(start)
    return f"{before}{start}\n{new}{end}{rest.partition(end)[2]}" if found else text


if __name__ == "__main__":
    README.write_text(render_readme(README.read_text(encoding="utf-8")), encoding="utf-8")
