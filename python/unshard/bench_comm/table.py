"""The table as text."""
import statistics

COLUMNS = (f"# {'operation':<14} {'size (B)':>11} {'count':>11}  {'type':<8} {'time (us)':>11} {'algbw (GB/s)':>13} "
           f"{'busbw (GB/s)':>13} {'wrong':>7}")


def head(world):
    versions = ", ".join(f"{name} {version}" for name, version in world["versions"].items())
    lines = [f"# unshard bench comm: {counted(world['ranks'], 'rank')} on {counted(len(world['hosts']), 'host')}, "
             f"tensors on {world['device']}, transport: {world['transport']}", f"# {versions}, {world['system']}"]
    lines += [f"# host {host['host']}: rank{'s' * (len(host['ranks']) > 1)} {ranges(host['ranks'])}" for host in world["hosts"]]
    lines += [f"# WARNING: host {host['host']} is busy ({host['busy']} before the first call): figures will be worse than it can do"
              for host in world["hosts"] if host["busy"]]
    lines += [f"# WARNING: rank {rank} runs other versions: {', '.join(f'{name} {version}' for name, version in versions.items())}"
              for rank, versions in world["different_versions"].items()]
    return lines + ["# time: median of the calls on each rank, of the slowest rank. busbw = algbw x 2(n-1)/n for all_reduce, (n-1)/n for",
                    "# reduce_scatter, all_gather and all_to_all, 1 for broadcast and send_recv. wrong: elements unlike the exact value.",
                    "#", COLUMNS]


def counted(number, word):
    return f"{number} {word}{'s' * (number != 1)}"


def ranges(numbers):
    """[0, 1, 2, 5] -> '0-2, 5'"""
    spans = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def line(row):
    return (f"  {row.operation:<14} {row.bytes:>11} {row.count:>11}  {row.dtype:<8} {row.time_us:>11.1f} {row.algbw_GBps:>13.3f} "
            f"{row.busbw_GBps:>13.3f} {row.wrong:>7}")


def average(rows):
    return statistics.fmean(row.busbw_GBps for row in rows) if rows else 0.0


def last_line(rows):
    wrong = sum(row.wrong for row in rows)
    return f"# average busbw {average(rows):.3f} GB/s; out of bounds: {wrong} {'FAILED' if wrong else 'OK'}"
