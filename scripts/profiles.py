"""What the device did while a profile was taken."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.profiler import ProfileData
from render_results import Figure

Event = tuple[str, float, float]  # name, start and end in nanoseconds


GRAPH = "command_buffer::"  # what XLA calls its work on CUDA graphs: to record, update and execute one


def profiled(call: Callable[[], object]) -> list[Event]:
    """Everything that ran on a GPU's streams during the call; empty without a GPU."""
    return list(kernel_events(profile_of(call)))


def profile_of(call: Callable[[], object]) -> ProfileData:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (path,) = Path(folder).glob("**/*.xplane.pb")
        return ProfileData.from_file(str(path))


def kernel_events(profile: ProfileData) -> Iterator[Event]:
    return _events(profile, "GPU", "Stream")


def graph_events(profile: ProfileData) -> Iterator[Event]:
    """What the host's threads did with CUDA graphs."""
    return (event for event in _events(profile, "/host:CPU", "") if event[0].startswith(GRAPH))


def _events(profile: ProfileData, plane_name: str, line_name: str) -> Iterator[Event]:
    for plane in profile.planes:
        if plane_name in plane.name:
            for line in plane.lines:
                if line_name in line.name:
                    for event in line.events:
                        yield event.name, event.start_ns, event.start_ns + event.duration_ns


def time_shares(events: list[Event]) -> tuple[float, Counter[str]]:
    """The share of the whole span in which nothing ran, and that of each kind of kernel; kernels side by side count
    both. Kernels whose names differ in numbers alone are one kind."""
    first, reached, busy = min(start for _, start, _ in events), 0.0, 0.0
    spent: Counter[str] = Counter()
    for name, start, end in sorted(events, key=lambda event: event[1:]):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        spent[re.sub(r"[_.]?\d+", "", name)[:60]] += end - start
    span = max(1.0, reached - first)
    return 1 - busy / span, Counter({name: time / span for name, time in spent.items()})


def profile_figures(what: str, call: Callable[[], object]) -> Iterator[Figure]:
    """In percent of the time from the first kernel to the last: how long none ran, what took most, and what the host
    spent on CUDA graphs meanwhile. Nothing without a GPU."""
    profile = profile_of(call)
    if not (events := list(kernel_events(profile))):
        return
    idle, shares = time_shares(events)
    yield Figure(f"{what}: profile, device idle", 100 * idle, "%")
    for name, share in shares.most_common(8):
        yield Figure(f"{what}: profile, {name}", 100 * share, "%")
    span = max(end for *_, end in events) - min(start for _, start, _ in events)
    spent: Counter[str] = Counter()
    for name, start, end in graph_events(profile):
        spent[name] += 100 * (end - start) / span
    for name, share in sorted(spent.items()):
        yield Figure(f"{what}: profile, host, {name}", share, "%")
