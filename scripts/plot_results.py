"""Draws benchmarks/results/kernels.json: the share of the copy bandwidth that plain decode attention reaches, over the
context and the batch; and how much faster tiles over a shared prefix are, over its length."""

import json
import re

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from render_results import FOLDER

PLAIN = re.compile(r"plain decode attention (\d+) x (\d+), GQA 32/8 / copy bandwidth")
SHARED = re.compile(r"shared ÷ plain, B = 256, own 128, prefix (\d+), (GQA-4|MHA)")


def main() -> None:
    content = json.loads((FOLDER / "kernels.json").read_text(encoding="utf-8"))
    plain: dict[int, list[tuple[int, float]]] = {}
    shared: dict[str, list[tuple[int, float]]] = {}
    for row in content["rows"]:
        if match := PLAIN.fullmatch(row["what"]):
            plain.setdefault(int(match[1]), []).append((int(match[2]), row["value"]))
        if match := SHARED.fullmatch(row["what"]):
            shared.setdefault(match[2], []).append((int(match[1]), row["value"]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for batch, points in sorted(plain.items()):
        left.plot(*zip(*sorted(points), strict=True), marker="o", label=f"B = {batch}")
    left.set(
        xscale="log", xlabel="context", ylabel="share of the copy bandwidth", title="plain decode attention, GQA 32/8"
    )
    left.axhline(1, color="grey", linewidth=0.5)
    for heads, points in shared.items():
        right.plot(*zip(*sorted(points), strict=True), marker="o", label=heads)
    right.set(
        xscale="log", xlabel="shared prefix", ylabel="plain ÷ shared tiles", title="256 sequences, 128 positions each"
    )
    right.axhline(1, color="grey", linewidth=0.5)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.legend()
    figure.suptitle(f"{content['device']}, JAX {content['versions']['jax']}, {content['date']}")
    figure.savefig(FOLDER / "kernels.png", dpi=120)


if __name__ == "__main__":
    main()
