"""Speculative decoding beside plain decoding: speculate.py DTYPE MODEL(GGUF) [--speculate ngram|DRAFT] [--batches 1,8] [--rounds N]

Two engines in one process answer the same requests in turns, without and with guesses; their tokens must be equal. Reported: tokens a
second from the last first token on, the best of the rounds (in turns, so that other work on the machine hits both), and how many guesses
were computed and right. "chat" asks questions whose answers repeat little; "summarise" and "rewrite" give a text (of Python's library,
which is on every machine) and ask for it in another form.
"""
import argparse
import json
import pathlib
import time

THREADS = 2
QUESTIONS = ["Why is the sky blue?", "Tell me a story about a dog that sails.", "What is a prime number?", "How do bridges carry weight?",
             "Tell me about Rome.", "Explain inflation.", "How do I bake bread?", "What does a lawyer do?"]


def asks(kind, count):
    text = pathlib.Path(json.__file__).read_text(encoding="utf-8")
    if kind == "chat":
        return [f"{QUESTIONS[i % len(QUESTIONS)]} Answer in {5 + i // len(QUESTIONS)} paragraphs." for i in range(count)]
    begin = "Summarise this text:\n\n" if kind == "summarise" else "Rewrite this code with better names:\n\n"
    return [begin + text[500 * i:500 * i + 2000] for i in range(count)]


def decode(llm, prompts, tokens):
    """(tokens a second once all have their first, the tokens of each)"""
    engine = llm.model.engine
    requests = [engine.submit(prompt, {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}) for prompt in prompts]
    firsts, answers, ends, times = set(), {request: [] for request in requests}, set(), []
    while len(ends) < len(requests):
        outputs = engine.poll(60)
        now = time.perf_counter()
        for request, _, token, _, _, finish, error in outputs:
            assert not error, error
            answers[request].append(token)
            if len(firsts) == len(requests):
                times.append(now)
            elif request not in firsts:
                firsts.add(request)
                start = now
            if finish:
                ends.add(request)
    return len(times) / (times[-1] - start), [answers[request] for request in requests]


def compare(plain, guessing, kind, batch, tokens, rounds):
    prompts = [plain.tokenizer.chat([{"role": "user", "content": ask}]) for ask in asks(kind, batch)]
    found, before = {"off": [], "on": []}, guessing.stats()
    for _ in range(rounds):
        off, wanted = decode(plain, prompts, tokens)
        on, got = decode(guessing, prompts, tokens)
        if got != wanted:
            raise SystemExit(f"speculate: {kind}, batch {batch}: guesses changed the output")
        found["off"].append(off)
        found["on"].append(on)
    after = guessing.stats()
    return {"kind": kind, "batch": batch, **{name: max(rates) for name, rates in found.items()},
            **{name: (after[name] - before[name]) // rounds for name in ("guessed", "accepted")}}


class Direct:
    """An engine without the thread that hands its outputs out."""

    def __init__(self, path, **options):
        from unshard.inference.model import open_model
        self.model = open_model(path, threads=THREADS, share_prefixes=False, **options)
        self.tokenizer, self.stats = self.model.tokenizer, self.model.engine.stats


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dtype")
    parser.add_argument("model")
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--always", action="store_true", help="guesses even where they don't pay")
    options = parser.parse_args()
    plain = Direct(options.model, dtype=options.dtype)
    guessing = Direct(options.model, dtype=options.dtype, speculate=options.speculate, always_guess=options.always)
    rows = []
    for batch in map(int, options.batches.split(",")):
        for kind in ("chat", "summarise", "rewrite"):
            rows.append(compare(plain, guessing, kind, batch, options.tokens, options.rounds))
            print(rows[-1], flush=True)
    print("RESULT " + json.dumps({"rows": rows}), flush=True)


if __name__ == "__main__":
    main()
