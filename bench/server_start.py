"""From starting `unshard serve` to the first token of an answer: server_start.py MODEL [OPTION...]; prints one JSON line.

The first start, which may have to read files and to convert the tokenizer, isn't timed.
"""
import json
import statistics
import subprocess
import sys
import time
import urllib.request

ROUNDS = 5


def start_to_first_token(model, options):
    """(seconds until it says that it serves, seconds until the first token)"""
    began = time.perf_counter()
    command = [sys.executable, "-m", "unshard", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = next((line for line in process.stdout if " is served on " in line), None)
        if line is None:
            raise RuntimeError(f"the server ended with exit code {process.wait()}")
        ready = time.perf_counter() - began
        body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "stream": True}).encode()
        address = line.split(" is served on ")[1].split()[0]
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            return ready, time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def main(model, *options):
    start_to_first_token(model, options)
    rounds = [start_to_first_token(model, options) for _ in range(ROUNDS)]
    ready, first = (statistics.median(values) for values in zip(*rounds))
    print("RESULT " + json.dumps({"ready_s": ready, "first_token_s": first}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
