"""`make demo`: two ranks train a GPT on real text under ZeRO-3; then the same at ZeRO 0 to 3, a few steps each, for a table.

Leaves runs/demo/loss.png, and the losses, memory and times beside it.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

EXAMPLES = pathlib.Path(__file__).resolve().parent
OUT = pathlib.Path("runs") / "demo"


def train(config, steps, sample, out, quiet):
    """One job of two ranks; returns its record."""
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "unshard.launcher", "--num_gpus=2", str(EXAMPLES / "train_gpt.py"),
               "--config", str(EXAMPLES / "configs" / config), f"--steps={steps}", f"--sample={sample}", f"--out={out}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE if quiet else None, text=True)
    if done.returncode:
        sys.exit(f"demo: {' '.join(command)} failed with exit code {done.returncode}\n{done.stdout or ''}")
    return json.loads(out.read_text())


def largest(record, pick):
    return max(pick(rank) for rank in record["ranks"])


def table(records):
    """One line a stage; of the two ranks the larger value each."""
    lines = ["           model states a rank, MB                       process, MB   a step, ms",
             "           parameters  gradients  optimizer      sum     a rank"]
    for record in records:
        mb = [largest(record, lambda rank, kind=kind: rank["states_mb"][kind]) for kind in ("parameters", "gradients", "optimizer")]
        process, step = largest(record, lambda rank: rank["process_mb"]), largest(record, lambda rank: rank["step_ms"])
        states = " ".join(f"{value:10.1f}" for value in mb)
        lines.append(f"ZeRO {record['stage']}     {states} {sum(mb):8.1f}   {process:8.0f}     {step:8.0f}")
    return "\n".join(lines)


def plot(losses, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="#2b6cb0", linewidth=1.8)
    axes.set(xlabel="step", ylabel="loss, nats a byte", xlim=(1, 1.06 * len(losses)))
    axes.set_title("A byte-level GPT on Python's standard library, ZeRO-3 on 2 ranks")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.annotate(f"{losses[-1]:.2f}", (len(losses), losses[-1]), textcoords="offset points", xytext=(4, 0), va="center")
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=70, help="of the ZeRO-3 run")
    parser.add_argument("--table-steps", type=int, default=6, help="of each stage, for the table")
    arguments = parser.parse_args()
    begin = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)

    print("== ZeRO-3 on two ranks, examples/configs/zero3.json", flush=True)
    record = train("zero3.json", arguments.steps, 300, OUT / "zero3.json", quiet=False)
    losses = record["losses"]
    plot(losses, OUT / "loss.png")

    print("\n== memory and time at ZeRO 0, 1, 2, 3", flush=True)
    records = [train(f"zero{stage}.json", arguments.table_steps, 0, OUT / f"stage{stage}.json", quiet=True) for stage in range(4)]
    text = table(records)
    print(text)
    (OUT / "table.txt").write_text(text + "\n")
    print(f"\nloss {losses[0]:.2f} -> {losses[-1]:.2f}; plot: {OUT / 'loss.png'}; {time.monotonic() - begin:.0f} s in all")
    if not sum(losses[-5:]) < 0.8 * sum(losses[:5]):
        sys.exit("demo: the loss did not fall")


if __name__ == "__main__":
    main()
