"""Vectors of 256 texts by all-MiniLM-L6-v2, timed: embed.py MODEL; one process, prints one JSON line.

Unshard and transformers in turns, two threads each, on the same tokens. transformers gets them as sentence-transformers gives them:
sorted by length, 32 at a time, padded to the longest of these.
"""
import json
import statistics
import sys
import time

THREADS, BATCH, ROUNDS, TEXTS = 2, 32, 5, 256
OURS = {"unshard_fp32": "fp32", "unshard_bf16": "bf16", "unshard_int8": "int8", "unshard_w8a8": "w8a8"}


def texts():
    """Sentences and paragraphs of Python's own documentation strings, 3 to 256 tokens each."""
    import argparse
    import asyncio
    import email
    import logging
    import pathlib
    import random
    found = []
    for module in (argparse, asyncio.tasks, email.message, logging, pathlib, statistics, random):
        for part in open(module.__file__, encoding="utf-8").read().split('"""')[1::2]:
            found += [piece for piece in (" ".join(each.split()) for each in part.split("\n\n")) if len(piece) > 10]
    random.Random(1).shuffle(found)
    return found[:TEXTS]


def by_transformers(model, tokens):
    import torch
    order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i]))
    vectors = [None] * len(tokens)
    with torch.inference_mode():
        for first in range(0, len(order), BATCH):
            some = order[first:first + BATCH]
            longest = len(tokens[some[0]])
            ids = torch.zeros(len(some), longest, dtype=torch.long)
            mask = torch.zeros(len(some), longest, dtype=torch.long)
            for row, i in enumerate(some):
                ids[row, :len(tokens[i])], mask[row, :len(tokens[i])] = torch.tensor(tokens[i]), 1
            rows = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            mean = (rows * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
            for row, vector in zip(some, torch.nn.functional.normalize(mean, dim=1), strict=True):
                vectors[row] = vector.numpy()
    return vectors


def main():
    import numpy
    import torch
    import unshard
    from transformers import AutoModel
    path = sys.argv[1]
    torch.set_num_threads(THREADS)
    embedders = {mode: unshard.Embedder(path, dtype=dtype, threads=THREADS) for mode, dtype in OURS.items()}
    tokens = [embedders["unshard_fp32"].encode(text, truncate=True) for text in texts()]
    modes = {mode: lambda embedder=embedder: embedder.embed_tokens(tokens) for mode, embedder in embedders.items()}
    for mode, dtype in (("transformers_fp32", torch.float32), ("transformers_bf16", torch.bfloat16)):
        model = AutoModel.from_pretrained(path, dtype=dtype).eval()
        modes[mode] = lambda model=model: by_transformers(model, tokens)
    times, vectors = {mode: [] for mode in modes}, {}
    for number in range(ROUNDS + 1):
        for mode, make in modes.items():
            time.sleep(0.05)                     # the other library's threads stop looking for work
            start = time.perf_counter()
            vectors[mode] = make()
            if number:
                times[mode].append(time.perf_counter() - start)
    wanted = numpy.stack(vectors["transformers_fp32"])
    result = {"texts": len(tokens), "tokens": sum(map(len, tokens)),
              "rates": {mode: len(tokens) / statistics.median(seconds) for mode, seconds in times.items()},
              "cosines": {mode: float((numpy.stack(list(found)) * wanted).sum(1).min()) for mode, found in vectors.items()}}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
