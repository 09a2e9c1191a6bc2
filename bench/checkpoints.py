"""The question of checkpoints: ours beside dd on the same disk in the same minutes, and beside DeepSpeed's."""
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from ranks import BenchError, run

OURS = sys.executable


def question(peers, failures, rounds, millions, say):
    """{"unshard": row, "deepspeed": row, "dd": {"write_gbps", "read_gbps"}}. UNSHARD_BENCH_DISK names a folder of the disk in question."""
    with tempfile.TemporaryDirectory(prefix="unshard_bench_", dir=os.environ.get("UNSHARD_BENCH_DISK")) as folder:
        result = {"folder": str(pathlib.Path(folder).parent), "millions": millions, "dd": {}}
        rows = {mode: [] for mode in ["unshard"] + (["deepspeed"] if peers else [])}
        disk = []
        for number in range(rounds):                       # in turns, so that a slow minute hits all of them
            for mode, runs in rows.items():
                place = pathlib.Path(folder, mode)
                try:
                    runs.append(run(peers if mode == "deepspeed" else OURS, "checkpoint.py", mode, place, millions, 2, limit=600))
                except BenchError as error:
                    failures.append(str(error))
                    say(f"  FAILED {error}")
                shutil.rmtree(place, ignore_errors=True)
            size = rows["unshard"][-1]["bytes"] if rows["unshard"] else int(millions * 12e6)
            disk.append(dd(pathlib.Path(folder), size))
            say(f"  round {number + 1}: dd (direct, cached), GB/s: " + "; ".join(
                f"{side} {modes[0]:.2f}, {modes[1]:.2f}" for side, modes in disk[-1].items()) + "".join(
                f"; {mode} saves {r[-1]['bytes'] / r[-1]['save_s'] / 1e9:.2f}, loads {r[-1]['bytes'] / r[-1]['load_s'] / 1e9:.2f}"
                for mode, r in rows.items() if r))
        for side in ("write", "read"):                     # of direct and cached the one that is faster most of the time
            result["dd"][f"{side}_gbps"] = max(statistics.median(modes) for modes in zip(*(one[side] for one in disk), strict=True))
        for mode, runs in rows.items():
            if runs:
                result[mode] = {key: statistics.median(one[key] for one in runs)
                                for key in ("bytes", "save_s", "save_on_disk_s", "load_s", "first_load_s", "save_extra_mb",
                                            "load_extra_mb")}
        return result


def dd(folder, size):
    """{"write": (GB/s direct, GB/s cached), "read": the same} of dd from and to memory, in blocks of 16 MiB."""
    source, target = pathlib.Path("/dev/shm", f"unshard_bench_{os.getpid()}"), folder / "dd"
    blocks = max(1, size >> 24)

    def rate(*arguments):
        begin = time.perf_counter()
        subprocess.run(["dd", "bs=16M", f"count={blocks}", *arguments], check=True, capture_output=True)
        return (blocks << 24) / (time.perf_counter() - begin) / 1e9

    def drop():
        with open(target, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        subprocess.run(["dd", "if=/dev/urandom", f"of={source}", "bs=16M", f"count={blocks}"], check=True, capture_output=True)
        write = tuple(rate(f"if={source}", f"of={target}", *flags) for flags in (["oflag=direct", "conv=fsync"], ["conv=fsync"]))
        drop()
        direct = rate(f"if={target}", "of=/dev/null", "iflag=direct")
        drop()
        return {"write": write, "read": (direct, rate(f"if={target}", "of=/dev/null"))}
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)


def speed(row, what):
    return row["bytes"] / row[f"{what}_s"] / 1e9


def targets(result, target):
    rows = []
    ours, peer, disk = result.get("unshard"), result.get("deepspeed"), result.get("dd")
    if ours and disk:
        for what, side in (("save", "write"), ("load", "read")):
            rows.append(target(f"checkpoint {what}, share of dd's speed", speed(ours, what) / disk[f"{side}_gbps"], 0.8, False))
            rows.append(target(f"checkpoint {what}, MB of memory a rank beside the state", ours[f"{what}_extra_mb"], 256, True))
    if ours and peer:
        rows.append(target("checkpoint save, speed over DeepSpeed's save_checkpoint", peer["save_s"] / ours["save_s"], 2, False))
        if "save_on_disk_s" in ours and "save_on_disk_s" in peer:
            rows.append(target("checkpoint save until it is on the disk, speed over DeepSpeed's",
                               peer["save_on_disk_s"] / ours["save_on_disk_s"], 2, False))
    return rows


def tables(result, table):
    if not result:
        return []
    rows = [[mode, f"{result[mode]['bytes'] / 1e6:.0f}", *(f"{result[mode][key]:.2f}" if key in result[mode] else "" for key in
                                                          ("save_s", "save_on_disk_s", "load_s", "first_load_s")),
             *(f"{speed(result[mode], what):.2f}" for what in ("save", "load")),
             *(f"{result[mode][key]:.0f}" for key in ("save_extra_mb", "load_extra_mb"))]
            for mode in ("unshard", "deepspeed") if mode in result]
    rows.append(["dd", "", "", "", "", "", f"{result['dd']['write_gbps']:.2f}", f"{result['dd']['read_gbps']:.2f}", "", ""])
    return [f"### A checkpoint of {result['millions']:g}M parameters (bf16, AdamW, ZeRO-3), 2 ranks, from and to the disk",
            table(["", "MB", "save s", "until on the disk s", "load s", "first load s", "save GB/s", "load GB/s", "save: extra MB a rank",
                   "load: extra MB a rank"], rows)]
