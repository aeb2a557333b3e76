"""Finds the sizes that are fastest on the device at hand, for each kind of tile, and writes them into
pallas_kernels/tuned.json: once for each kind of device and shape of heads."""

import argparse
import itertools
import json
import statistics

from benchmark_kernels import Prepared, Work, plain, prefill, prepare, shared, time_works

from pallas_kernels import default_implementation, tuning_for
from pallas_kernels.tuning import TABLE, device_kind, table

CANDIDATES = {  # block_kv, num_warps, num_stages; programs
    "narrow": ([(64, 4, 2), (64, 4, 3), (64, 2, 3), (32, 2, 4), (128, 4, 2)], [528]),
    "shared": ([(64, 4, 2), (64, 4, 3)], [132, 198, 264, 396]),
    "own": ([(32, 2, 3), (32, 2, 4), (64, 2, 2), (64, 4, 2), (32, 2, 2)], [528]),
    "wide": ([(64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 8, 3)], [264]),
}


def works_of(kind: str, **heads) -> list[Work]:
    if kind == "narrow":
        return [plain(batch, context, **heads) for batch, context in ((64, 1024), (256, 1024), (8, 8192))]
    if kind == "wide":
        return [prefill(2048, cached, **heads) for cached in (0, 4096)]
    return [shared(256, prefix, 128, True, **heads) for prefix in (2048, 8192)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--implementation", default=default_implementation())
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows = table().setdefault(device_kind(), {})
    for kind in args.kinds:
        key = f"{kind}, G = {args.group}, D = {args.head_dim}, bfloat16"
        num_rows = tuning_for(kind, args.group, args.head_dim, "bfloat16", implementation="pallas").rows
        heads = {"group": args.group, "num_kv_heads": args.num_kv_heads, "head_dim": args.head_dim}
        works = works_of(kind, **heads)
        candidates, prepared = [], list[Prepared]()
        for (block_kv, num_warps, num_stages), programs in itertools.product(*CANDIDATES[kind]):
            rows[key] = {"rows": num_rows, "block_kv": block_kv, "num_warps": num_warps, "num_stages": num_stages}
            rows[key]["programs"] = programs
            candidates.append(rows[key])
            prepared += prepare(works, args.implementation)
        times = [statistics.median(taken) for taken in time_works(prepared, args.implementation, args.repeats)[0]]
        by_candidate = [times[i : i + len(works)] for i in range(0, len(times), len(works))]
        best = [min(column) for column in zip(*by_candidate, strict=True)]
        scores = [statistics.geometric_mean(t / b for t, b in zip(row, best, strict=True)) for row in by_candidate]
        for candidate, score, row in sorted(zip(candidates, scores, by_candidate, strict=True), key=lambda c: c[1]):
            print(f"{key}: {score:.3f} {[round(t * 1e6, 1) for t in row]} µs {candidate}", flush=True)
        rows[key] = min(zip(scores, range(len(scores)), candidates, strict=True))[2]
    TABLE.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
