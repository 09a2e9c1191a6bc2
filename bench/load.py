"""A load test of the server: load.py [--clients 16,64] [--seconds 60] [--plot FILE] [-- serve's options]

Each client asks, waits for the whole answer as it streams, and asks again: short and long prompts (of text that is on every machine),
short and long answers, greedy. Reported, for each number of clients: tokens a second, requests a second, and the 50th, 95th and 99th
percentile of the time to the first token and between two tokens. Then: the first token of a short prompt while a prompt of 2,000 tokens is
computed, in ms and in the time that a step takes meanwhile.
"""
import argparse
import asyncio
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

import inference

MODEL = "smollm2"


class Server:
    def __init__(self, options):
        model = str(inference.model_file())
        command = [sys.executable, "-m", "unshard.cli", "serve", model, "--port", "0", "--served-model-name", MODEL, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if " is served on " in line:
                self.port = int(line.split(" is served on ")[1].split()[0].rsplit(":", 1)[1])
                return
        raise SystemExit(f"load: the server ended with exit code {self.process.wait()}")

    def end(self):
        self.process.terminate()
        self.process.wait(60)


async def ask(port, prompt, max_tokens):
    """[seconds at which each token came, from the start]"""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        times = []
        while line := await reader.readline():
            if line.startswith(b"data: {") and b'"finish_reason":null' in line.replace(b" ", b""):
                times.append(time.perf_counter() - start)
        if not times:
            raise RuntimeError("an answer without tokens")
        return times
    finally:
        writer.close()


def prompts():
    """Texts of about 20 to 1,500 tokens, most of them short, no two alike."""
    text = pathlib.Path(os.__file__).read_text() + pathlib.Path(json.__file__).read_text()
    rng = random.Random(7)
    while True:
        length = rng.choice([60, 120, 240, 500, 1000, 4500])
        begin = rng.randrange(len(text) - length)
        yield text[begin:begin + length], rng.choice([16, 32, 64, 128])


async def client(port, asked, until, found):
    while time.perf_counter() < until:
        prompt, tokens = next(asked)
        found.append(await ask(port, prompt, tokens))


async def crowd(port, clients, seconds):
    found, asked = [], prompts()
    begin = time.perf_counter()
    await asyncio.gather(*(client(port, asked, begin + seconds, found) for _ in range(clients)))
    took = time.perf_counter() - begin
    return {"clients": clients, "seconds": took, "tokens_s": sum(map(len, found)) / took, "requests_s": len(found) / took,
            "first": [times[0] for times in found], "between": [b - a for times in found for a, b in zip(times, times[1:])]}


async def counters(port):
    """(steps of the engine so far, seconds in them)"""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        values = dict(line.rsplit(" ", 1) for line in (await reader.read()).decode().splitlines() if line.startswith("unshard_"))
        return float(values["unshard_steps_total"]), float(values["unshard_busy_seconds_total"])
    finally:
        writer.close()


async def beside_a_long_prompt(port, rounds=9):
    """Seconds to the first token of a short prompt (about 30 tokens): [alone], [while 2,000 tokens are computed], [a step of these]."""
    text = pathlib.Path(random.__file__).read_text()[:6600]
    question = " What would a sailor write home about the sea, the sky and the wind in the winter, before the long night comes and all the"
    alone, beside, steps = [], [], []
    for i in range(rounds):
        alone.append((await ask(port, f"{2 * i}.{question}", 1))[0])
        steps_before, busy_before = await counters(port)
        long = asyncio.create_task(ask(port, f"{i} {text}", 1))
        await asyncio.sleep(0.15)
        beside.append((await ask(port, f"{2 * i + 1}.{question}", 1))[0])
        await long
        steps_after, busy_after = await counters(port)
        steps.append((busy_after - busy_before) / (steps_after - steps_before))
    return alone, beside, steps


def percentiles(values):
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99)]


def said(values):
    return ", ".join(f"P{p} {value * 1000:.0f}" for p, value in zip((50, 95, 99), values)) + " ms"


def plot(results, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for axis, key, title in ((axes[0], "first", "time to the first token"), (axes[1], "between", "time between tokens")):
        for result in results:
            ordered = sorted(result[key])
            axis.plot([1000 * value for value in ordered], [100 * (i + 1) / len(ordered) for i in range(len(ordered))],
                      label=f"{result['clients']} clients, {result['tokens_s']:.0f} tokens/s")
        axis.set(title=title, xlabel="ms", ylabel="% of all, at most", xscale="log", ylim=(0, 101))
        axis.grid(alpha=0.25)
        axis.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="16,64")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--plot", help="PNG of the distributions")
    parser.add_argument("serve", nargs="*", help="options of `unshard serve`, after --")
    options = parser.parse_args()
    server, results = Server(options.serve), []
    try:
        asyncio.run(crowd(server.port, 4, 3))                             # warm
        for clients in map(int, options.clients.split(",")):
            result = asyncio.run(crowd(server.port, clients, options.seconds))
            results.append(result)
            first, between = percentiles(result["first"]), percentiles(result["between"])
            print(f"{clients} clients, {result['seconds']:.0f} s: {result['tokens_s']:.0f} tokens/s, {result['requests_s']:.1f} requests/s;"
                  f" first token {said(first)}; between tokens {said(between)} (P95 is {between[1] / between[0]:.2f} of P50)", flush=True)
        alone, beside, step = asyncio.run(beside_a_long_prompt(server.port))
        in_steps = [one / of for one, of in zip(beside, step)]
        alone, beside, step = (1000 * statistics.median(each) for each in (alone, beside, step))
        print(f"first token of a short prompt: {alone:.0f} ms alone, {beside:.0f} ms while 2,000 tokens are computed in steps of"
              f" {step:.0f} ms: {statistics.median(in_steps):.1f} steps' time (at most {max(in_steps):.1f})")
    finally:
        server.end()
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
