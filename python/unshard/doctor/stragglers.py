"""Ranks that the others wait for, again and again.

All ranks leave a collective at about the same time, so that who stays in it for the shortest time came last: no clocks are compared. The
same call of every step (one operation with one detail) makes a series."""
import dataclasses
import statistics

from unshard.doctor.compare import calls_of, group_names, groups_named

_LEAST_CALLS = 8
_LEAST_LATE_S = 0.002
_LEAST_SHARE = 0.1           # of the time between two calls of the series
_LEAST_TIMES = 0.7           # of the calls in which it came last, or nearly
_OWN_SHARE = 0.5             # of its lateness, that it spends by itself since the collective before: else it only woke late from that
_ONE_SIDED = ("broadcast",)  # the root doesn't wait


@dataclasses.dataclass
class Straggler:
    rank: int
    call: str
    late_s: float            # median: so much later than the first rank
    period_s: float          # median time between two of these calls
    calls: int


def stragglers(records):
    """The worst series of each rank that lags by a clear margin, the worst rank first."""
    worst = {}
    for name in group_names(records):
        for call, rows in series(groups_named(records, name)).items():
            for one in laggards(call, rows):
                if one.rank not in worst or worst[one.rank].late_s < one.late_s:
                    worst[one.rank] = one
    return sorted(worst.values(), key=lambda one: -one.late_s)


def series(groups):
    """{call: [{rank: entry} for each time all members made it]}"""
    if len(groups) < 2:
        return {}
    calls = {rank: calls_of(group) for rank, group in groups.items()}
    shared = set.intersection(*(set(table) for table in calls.values()))
    found = {}
    for index in sorted(shared):
        row = {rank: {**table[index], "before": table.get(index - 1, {}).get("end")} for rank, table in calls.items()}
        entries = list(row.values())
        ended = all(entry["end"] is not None for entry in entries)
        same = len({(entry["op"], entry["detail"]) for entry in entries}) == 1
        if ended and same and entries[0]["op"] not in _ONE_SIDED:
            found.setdefault(f"{entries[0]['op']} '{entries[0]['detail']}'", []).append(row)
    return found


def laggards(call, rows):
    if len(rows) < _LEAST_CALLS:
        return []
    late = {rank: [] for rank in rows[0]}
    for row in rows:
        stays = {rank: entry["end"] - entry["start"] for rank, entry in row.items()}
        longest = max(stays.values())
        for rank, stay in stays.items():
            late[rank].append(longest - stay)
    medians = {rank: statistics.median(values) for rank, values in late.items()}
    found = []
    for rank, median in medians.items():
        others = statistics.median_low([m for r, m in medians.items() if r != rank])
        starts = [row[rank]["start"] for row in rows]
        period = statistics.median(b - a for a, b in zip(starts, starts[1:], strict=False))
        often = sum(value >= 0.5 * max(late[r][i] for r in late) for i, value in enumerate(late[rank])) / len(rows)
        own = statistics.median(row[rank]["start"] - (row[rank]["before"] or float("-inf")) for row in rows)
        if own >= _OWN_SHARE * median >= 0 and median >= max(_LEAST_LATE_S, _LEAST_SHARE * period, 3 * others) and often >= _LEAST_TIMES:
            found.append(Straggler(rank, call, median, period, len(rows)))
    return found
