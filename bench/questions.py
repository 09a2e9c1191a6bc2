"""What the bench asks, one function a question. Each returns plain data for bench/results.json."""
import statistics
import sys

from ranks import BenchError, run

OURS = sys.executable
TRAINING_MODES = ["solo", "ddp", "fsdp2", "unshard0", "unshard1", "unshard2", "unshard3"]
LOSS_TOLERANCE = {"fp32": 2e-4, "bf16": 5e-2}      # bf16: DDP's autocast over fp32 weights and bf16 weights round differently


def say(text):
    print(text, flush=True)


def attempt(failures, python, *arguments, **options):
    """run(), or None with the reason kept: one mode that fails must not hide the others."""
    try:
        return run(python, *arguments, **options)
    except BenchError as error:
        failures.append(str(error))
        say(f"  FAILED {error}")
        return None


def training(peers, failures, rounds, steps, batch, dtypes, only=None):
    """{dtype: {mode: medians over the rounds}}; the modes take turns, so that a slow minute hits all of them."""
    modes = TRAINING_MODES + (["deepspeed2", "deepspeed3"] if peers else [])
    modes = [mode for mode in modes if not only or mode in only]
    result = {}
    for dtype in dtypes:
        runs = {mode: [] for mode in modes}
        for round_number in range(rounds):
            for mode in modes:
                python = peers if mode.startswith("deepspeed") else OURS
                one = attempt(failures, python, "train_step.py", mode, dtype, steps, batch)
                if one:
                    runs[mode].append(one)
                    say(f"  {dtype} round {round_number + 1}: {mode:10} {one['step_ms']:7.0f} ms  {one['pss_mb']:6.0f} MB  "
                        f"loss {one['losses'][-1]:.4f}")
        result[dtype] = {mode: summary(of_mode) for mode, of_mode in runs.items() if of_mode}
        compare_losses(result[dtype], dtype, failures)
        refuse_noise(result[dtype], dtype, failures)
    return result


def summary(runs):
    medians = {key: statistics.median(one[key] for one in runs) for key in ("step_ms", "pss_mb", "initialize_s")}
    return {**medians, "step_ms_all": [one["step_ms"] for one in runs], "losses": runs[0]["losses"]}


def compare_losses(modes, dtype, failures):
    """A speed is worth nothing where the numbers differ: every mode that talks must follow DDP's losses."""
    reference = modes.get("ddp")
    for mode, row in modes.items():
        if reference and mode != "solo":
            worst = max(abs(a - b) for a, b in zip(row["losses"], reference["losses"]))
            row["worst_loss_difference"] = worst
            if worst > LOSS_TOLERANCE[dtype]:
                failures.append(f"{dtype} {mode}: its losses differ from DDP's by up to {worst:.2g} (allowed {LOSS_TOLERANCE[dtype]:g})")


def refuse_noise(modes, dtype, failures):
    """Nothing that talks is faster than compute alone by more than a few per cent; where it seems so, the machine did something else.
    (In bf16 solo and DDP autocast, which casts the weights again in every step; the others keep bf16 weights and may be a bit faster.)"""
    solo, share = modes.get("solo"), {"fp32": 0.95, "bf16": 0.85}[dtype]
    for mode, row in modes.items():
        if solo and row["step_ms"] < share * solo["step_ms"]:
            failures.append(f"{dtype} {mode}: {row['step_ms']:.0f} ms a step is faster than compute only ({solo['step_ms']:.0f} ms): "
                            "the machine was busy, its ratios say nothing; run again")


def update(peers, failures, millions, rounds):
    kinds = ["torch_fused", "unshard", "whole_torch", "whole_unshard"] + (["deepspeed_cpu_adam", "whole_deepspeed"] if peers else [])
    runs = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            one = attempt(failures, peers if "deepspeed" in kind else OURS, "update.py", kind, millions, ranks=1)
            if one:
                runs[kind].append(one)
    result = {}
    for kind, of_kind in runs.items():
        if of_kind:
            result[kind] = {"median_ms": statistics.median(one["median_ms"] for one in of_kind),
                            "min_ms": min(one["min_ms"] for one in of_kind), "norm": of_kind[0]["norm"]}
            say(f"  {kind:20} {result[kind]['median_ms']:7.1f} ms")
    for group in (["torch_fused", "unshard", "deepspeed_cpu_adam"], ["whole_torch", "whole_unshard"]):
        norms = [result[kind]["norm"] for kind in group if kind in result]
        if norms and max(norms) - min(norms) > 1e-3 * max(norms):
            failures.append(f"the updated weights of {', '.join(group)} differ: norms {norms}")
    return result


def collectives(peers, failures):
    rows = []
    for kind in ["unshard", "gloo"] + (["deepspeed"] if peers else []):
        one = attempt(failures, peers if kind == "deepspeed" else OURS, "collectives.py", kind)
        for row in one["rows"] if one else []:
            rows.append({"kind": kind, **row})
            if not row["right"]:
                failures.append(f"{kind} {row['operation']} of {row['bytes']} bytes gives wrong values")
            shares = [row[bound] / row["median_us"] for bound in ("bound_us", "same_size_us")]
            say(f"  {kind:10} {row['operation']:15} {row['bytes'] >> 10:7} KiB {row['median_us']:10.1f} us   "
                f"of memcpy's speed {shares[0]:.2f}, in blocks of that size {shares[1]:.2f}")
    return rows


def startup(peers, failures, rounds):
    result = {}
    for name, python in [("unshard", OURS)] + ([("deepspeed", peers)] if peers else []):
        imports = [attempt(failures, python, "startup.py", "import", name, ranks=1) for _ in range(rounds)]
        starts = [attempt(failures, python, "startup.py", "initialize", name, ranks=1) for _ in range(rounds)]
        if all(imports) and all(starts):
            result[name] = {"import_s": statistics.median(one["import_s"] for one in imports),
                            "initialize_s": statistics.median(one["initialize_s"] for one in starts),
                            "first_step_s": statistics.median(one["first_step_s"] for one in starts)}
            say(f"  {name:10} import {result[name]['import_s']:.2f} s over torch, first initialize {result[name]['initialize_s']:.2f} s, "
                f"first step {result[name]['first_step_s']:.2f} s")
    return result


def touch(failures):
    one = attempt(failures, OURS, "touch.py")
    if one:
        say(f"  a touched operator costs {one['touched_us']:+.2f} us, another {one['others_us']:+.2f} us (of {one['plain_us']:.2f} us)")
    return one
