"""What the checkpoint benchmark saw of its arms, as numbers and as Markdown tables beside their targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from checkpoint_processes import Usage

OURS = "e"
TARGET_SPEEDUP = 3
TARGET_GROWTH_MB = 256


@dataclass(frozen=True)
class Turn:
    """One save and one load of one arm, rank by rank.

    Attributes:
        sync_seconds: until what the save had left to the page cache was on the disk.
    """

    save: list[Usage]
    sync_seconds: float
    load: list[Usage]


Value = Callable[[Turn], float]


def save_seconds(turn: Turn) -> float:
    """Until the slowest rank was done."""
    return max(rank.seconds for rank in turn.save)


def durable_seconds(turn: Turn) -> float:
    """Until everything is on the disk."""
    return save_seconds(turn) + turn.sync_seconds


def load_seconds(turn: Turn) -> float:
    return max(rank.seconds for rank in turn.load)


@dataclass
class ArmResult:
    """What was seen of one arm.

    Attributes:
        name: of the arm.
        fsync: what reaches the disk before a save returns.
        names: how the saved folder names the experts' weights.
        folder_bytes: the size of all files of the saved folder.
        warm_up: a first turn, whose times do not count.
        turns: one a round.
    """

    name: str
    fsync: str
    names: str
    folder_bytes: int
    warm_up: Turn
    turns: list[Turn] = field(default_factory=list)

    def values(self, value: Value) -> list[float]:
        return [value(turn) for turn in self.turns]

    def median(self, value: Value) -> float:
        return statistics.median(self.values(value))

    def ratio_to(self, other: ArmResult, value: Value) -> float:
        """How many times the other's value this arm has: the median over the rounds, in each of which both ran."""
        pairs = zip(self.values(value), other.values(value), strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def growth_mb(self, operation: str) -> float:
        """The most that any rank's resident set grew by in any turn. The first counts: later ones reuse its memory."""
        return max(rank.growth for turn in [self.warm_up, *self.turns] for rank in getattr(turn, operation)) / 1e6


def report(num_bytes: int, results: dict[str, ArmResult]) -> str:
    """Tables of times, bytes and memory, and how far expertmesh is from its targets."""
    parts = [_times(results), _bytes(num_bytes, results)]
    if OURS in results:
        parts.append(_targets(num_bytes, results))
    return "\n\n".join(parts)


def _times(results: dict[str, ArmResult]) -> str:
    measured = {"save": save_seconds, "save + sync": durable_seconds, "load": load_seconds}
    ratios = measured if OURS in results else {}
    seconds = [f"{title} s" for title in measured]
    columns = ["arm", *seconds, *(f"{title} / ({OURS})" for title in ratios), "fsync", "experts' names"]
    rows = []
    for arm, result in results.items():
        times = [_spread(result.values(value)) for value in measured.values()]
        multiples = [f"{result.ratio_to(results[OURS], value):.2f}" for value in ratios.values()]
        rows.append([f"({arm}) {result.name}", *times, *multiples, result.fsync, result.names])
    return f"Medians (lowest to highest).\n\n{_markdown(columns, rows)}"


def _bytes(num_bytes: int, results: dict[str, ArmResult]) -> str:
    counted = {
        "saving: pages dirtied": ("save", "dirtied"),
        "write()": ("save", "written"),
        "read()": ("save", "read"),
        "loading: read()": ("load", "read"),
        "mapped": ("load", "mapped"),
    }
    columns = ["arm", "files", *counted, "growth saving MB", "growth loading MB"]
    rows = []
    for arm, result in results.items():
        shares = [_share(num_bytes, result, operation, counter) for operation, counter in counted.values()]
        growth = [f"{result.growth_mb(operation):.0f}" for operation in ("save", "load")]
        rows.append([f"({arm})", f"{result.folder_bytes / num_bytes:.2f}", *shares, *growth])
    legend = "Bytes in multiples of the model's size: all ranks together (the rank with the most)."
    return f"{legend}\n\n{_markdown(columns, rows)}"


def _targets(num_bytes: int, results: dict[str, ArmResult]) -> str:
    ours = results[OURS]
    lines = [f"- bytes written: {_share(num_bytes, ours, 'save', 'dirtied', 3)} x the model's; target 1.00 and headers"]
    others = {arm: result for arm, result in results.items() if arm != OURS}
    for title, value in (("save", save_seconds), ("save + sync", durable_seconds)):
        if others:
            fastest = min(others, key=lambda arm: others[arm].median(value))
            speedup = others[fastest].ratio_to(ours, value)
            lines.append(
                f"- {title}: {speedup:.2f} x faster than ({fastest}), the fastest other; target {TARGET_SPEEDUP}"
            )
    lines.append(f"- peak growth of a rank while saving: {ours.growth_mb('save'):.0f} MB; target {TARGET_GROWTH_MB}")
    return "expertmesh:\n" + "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _share(num_bytes: int, result: ArmResult, operation: str, counter: str, digits: int = 2) -> str:
    def over_ranks(combine: Callable[[Iterable[int]], int]) -> float:
        return result.median(lambda turn: combine(getattr(rank, counter) for rank in getattr(turn, operation)))

    return f"{over_ranks(sum) / num_bytes:.{digits}f} ({over_ranks(max) / num_bytes:.{digits}f})"


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
