"""Ratios against the targets, and the tables of docs/performance.md."""
import pathlib

import checkpoints
import hosts
import inference
import servers

DOC = pathlib.Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
PEER_NAMES = {"ddp": "PyTorch DDP", "fsdp2": "PyTorch FSDP2", "deepspeed2": "DeepSpeed ZeRO-2", "deepspeed3": "DeepSpeed ZeRO-3",
              "solo": "compute only"}


def name_of(mode):
    return PEER_NAMES.get(mode) or f"Unshard ZeRO-{mode[-1]}"


def target(what, value, limit, at_most):
    met = value <= limit if at_most else value >= limit
    return what, value, f"{'<=' if at_most else '>='} {limit:g}", met


def targets(results):
    """[(what, measured, wanted, met)]; a target whose peers weren't there is left out."""
    rows = [row for dtype, modes in results.get("training", {}).items() for row in training_targets(dtype, modes)]
    rows += update_targets(results.get("update", {})) + collective_targets(results.get("collectives", []))
    if results.get("touch"):
        rows.append(target("a touched, resident parameter, us an operator", results["touch"]["touched_us"], 0.5, True))
    rows += checkpoints.targets(results.get("checkpoint", {}), target)
    rows += hosts.targets(results.get("hosts", {}), target, name_of)
    rows += inference.targets(results.get("inference", {}), target)
    rows += servers.targets(results.get("serving", {}), target)
    startup = results.get("startup", {}).get("unshard")
    if startup:
        rows += [target("import over torch, s", startup["import_s"], 0.2, True),
                 target("first initialize, s", startup["initialize_s"], 0.5, True)]
    return rows


def training_targets(dtype, modes):
    rows, ours, solo = [], modes.get("unshard3"), modes.get("solo")
    if not ours or not solo:
        return rows
    for peer, share, speed in (("ddp", 0.4, 1.06), ("fsdp2", 0.12, 1.35), ("deepspeed3", None, 1.5)):
        if peer not in modes:
            continue
        if share:
            added = (ours["step_ms"] - solo["step_ms"]) / (modes[peer]["step_ms"] - solo["step_ms"])
            rows.append(target(f"{dtype}: what ZeRO-3 adds to compute, of what {name_of(peer)} adds", added, share, True))
        rows.append(target(f"{dtype}: ZeRO-3, speed over {name_of(peer)}", modes[peer]["step_ms"] / ours["step_ms"], speed, False))
    peers = [row["pss_mb"] for mode, row in modes.items() if mode in PEER_NAMES and mode != "solo"]
    if peers:
        rows.append(target(f"{dtype}: ZeRO-3, peak memory of the smallest peer's", ours["pss_mb"] / min(peers), 1, True))
    return rows


def update_targets(update):
    rows = []
    if "unshard" in update:
        peer = min(row["median_ms"] for kind, row in update.items() if kind in ("torch_fused", "deepspeed_cpu_adam"))
        rows.append(target("fp32 AdamW, time of the faster peer's", update["unshard"]["median_ms"] / peer, 1.05, True))
    if "whole_unshard" in update and "whole_deepspeed" in update:
        speed = update["whole_deepspeed"]["median_ms"] / update["whole_unshard"]["median_ms"]
        rows.append(target("bf16 update with fp32 masters, speed over DeepSpeed", speed, 1.4, False))
    return rows


def collective_targets(collectives):
    rows = []
    for row in collectives:
        if row["kind"] == "unshard" and row["bytes"] >= 1 << 20:
            what = f"{row['operation']} of {row['bytes'] >> 20} MiB, share of memcpy's speed"
            rows.append(target(what, row["bound_us"] / row["median_us"], 0.5, False))
        elif row["kind"] == "unshard" and row["bytes"] == 64 << 10:
            rows.append(target(f"{row['operation']} of 64 KiB, us", row["median_us"], 25, True))
    return rows


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def training_table(training):
    rows = []
    for mode in dict.fromkeys(mode for modes in training.values() for mode in modes):
        row = [name_of(mode)]
        for modes in training.values():
            one, solo = modes.get(mode), modes.get("solo")
            over = f"{one['step_ms'] - solo['step_ms']:+.0f}" if one and solo else ""
            row += [f"{one['step_ms']:.0f}", over, f"{one['pss_mb']:.0f}"] if one else ["", "", ""]
        rows.append(row)
    header = [""] + [text for dtype in training for text in (f"{dtype} ms a step", "over compute", "peak MB a rank")]
    return table(header, rows)


def document(results):
    def when(question):
        """Where and when this question was asked: a run of some questions leaves the others' answers as they were."""
        said = results["measured"][question]
        return f"Measured {said['date']} on {said['machine']}, torch {said['torch']}, commit {said['commit']}: `{said['command']}`."

    parts = ["Left out, because they weren't there: " + ", ".join(results["left_out"]) + "." if results["left_out"] else ""]
    if results.get("training"):
        parts += ["### A training step", when("training"), training_table(results["training"])]
    if results.get("update"):
        parts += [f"### The update of {results['update_millions']:g}M elements, 1 thread", when("update"),
                  table(["", "ms"], [[kind, f"{row['median_ms']:.1f}"] for kind, row in results["update"].items()])]
    if results.get("collectives"):
        parts += ["### Collectives, 2 ranks", when("collectives"),
                  "Shares of the speed of memcpy: of blocks too large for the caches (the target's), and of blocks of that very size, "
                  "which for small ones is the core's own cache.",
                  table(["", "operation", "KiB", "us (median)", "share of memcpy's speed", "of blocks of that size"],
                        [[row["kind"], row["operation"], str(row["bytes"] >> 10), f"{row['median_us']:.1f}",
                          f"{row['bound_us'] / row['median_us']:.2f}", f"{row['same_size_us'] / row['median_us']:.2f}"]
                         for row in results["collectives"]])]
    if results.get("startup"):
        parts += ["### Start-up", when("startup"), table(["", "import over torch, s", "first initialize, s", "first step, s"],
                                        [[name, *(f"{row[key]:.2f}" for key in ("import_s", "initialize_s", "first_step_s"))]
                                         for name, row in results["startup"].items()])]
    for question, tables in (("checkpoint", checkpoints.tables(results.get("checkpoint", {}), table)),
                             ("hosts", hosts.tables(results.get("hosts", {}), table, name_of)),
                             ("inference", inference.tables(results.get("inference", {}), table)),
                             ("serving", servers.tables(results.get("serving", {}), table))):
        parts += [*tables[:1], when(question), *tables[1:]] if tables else []
    rows = [[what, f"{value:.3g}", wanted, "met" if met else "**not met**"] for what, value, wanted, met in targets(results)]
    parts += ["### Against the targets", table(["", "measured", "wanted", ""], rows)]
    return "\n\n".join(part for part in parts if part)


def write_document(results):
    text = DOC.read_text()
    head, rest = text.split(BEGIN)
    DOC.write_text(head + BEGIN + "\n" + document(results) + "\n" + END + rest.split(END)[1])
