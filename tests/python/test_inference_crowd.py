"""Requests of random shape, cancelled at random, on a small random model: every answer is that of its solo run, nothing is left behind.

`make soak` runs 10,000 of them.
"""
import os
import random
import time

import pytest
from inference_models import save_tiny

from unshard import _core

REQUESTS = 1000 * int(os.environ.get("UNSHARD_SOAK", "0")) or 400
TEMPLATES = 40                                 # so many different requests, each asked again and again in other company


def resident_mb():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def templates(rng):
    """(prompt, options): equal beginnings, long and short, greedy and drawn, one and several sequences."""
    heads = [[rng.randrange(3, 250) for _ in range(length)] for length in (5, 16, 33, 64)]
    found = []
    for _ in range(TEMPLATES):
        prompt = rng.choice(heads) + [rng.randrange(3, 250) for _ in range(rng.choice([0, 1, 3, 15, 16, 40, 90]))]
        options = {"max_tokens": rng.choice([1, 2, 7, 16, 30, 60]), "n": rng.choice([1, 1, 1, 2, 3]), "ignore_eos": rng.random() < 0.5,
                   "temperature": rng.choice([0.0, 0.8, 1.3]), "top_p": rng.choice([1.0, 0.9]), "seed": rng.randrange(1 << 40),
                   "repetition_penalty": rng.choice([1.0, 1.2]), "priority": rng.choice([0, 1, 2])}
        found.append((prompt, options))
    return found


def collect(engine, answers, ends, wait=0.0):
    for request, index, token, _, _, finish, error in engine.poll(wait):
        assert not error, error
        if token >= 0:
            answers.setdefault((request, index), []).append(token)
        if finish:
            ends[(request, index)] = finish


def solo_runs(path, asked):
    engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 2048, "share_prefixes": False})
    found = []
    for prompt, options in asked:
        answers, ends = {}, {}
        request = engine.submit(prompt, options)
        while len(ends) < options["n"]:
            collect(engine, answers, ends, 30)
        found.append([(answers[(request, i)], ends[(request, i)]) for i in range(options["n"])])
    engine.close()
    return found


@pytest.mark.parametrize("guesses", ["none", "ngram", "draft"])
def test_every_answer_is_its_solo_run(tmp_path, guesses):
    rng = random.Random(int(os.environ.get("UNSHARD_SEED", "11")))
    save_tiny("llama", tmp_path / "model")
    speculate = {"none": "", "ngram": "ngram", "draft": str(tmp_path / "model")}[guesses]
    asked = templates(rng)
    solo = solo_runs(tmp_path / "model", asked)
    engine = _core.InferenceEngine(str(tmp_path / "model"), {"dtype": "fp32", "threads": 2, "kv_cache_tokens": 640, "step_tokens": 48,
                                                            "max_sequences": 24, "max_waiting": 64, "speculate": speculate,
                                                            "always_guess": speculate != ""})
    answers, ends, which, cancelled, open_requests = {}, {}, {}, set(), []
    refused, half = 0, None
    while len(which) < REQUESTS:
        template = rng.randrange(TEMPLATES)
        try:
            request = engine.submit(*asked[template])
        except _core.Overloaded:
            refused += 1
            collect(engine, answers, ends, 0.05)              # the queue is always full
            continue
        which[request] = template
        open_requests.append(request)
        if rng.random() < 0.2:
            victim = rng.choice(open_requests[-40:])
            engine.cancel(victim)
            cancelled.add(victim)
        if len(which) == REQUESTS // 2:
            half = resident_mb()
    deadline = time.monotonic() + 120
    wanted = {(request, i) for request, template in which.items() for i in range(asked[template][1]["n"])}
    while wanted - ends.keys():
        assert time.monotonic() < deadline, f"{len(wanted - ends.keys())} sequences never ended"
        collect(engine, answers, ends, 1)
    for (request, index), finish in ends.items():
        tokens, end = solo[which[request]][index]
        got = answers.get((request, index), [])
        if finish == "cancelled":
            assert request in cancelled and got == tokens[:len(got)], (which[request], index)
        else:
            assert (got, finish) == (tokens, end), (which[request], index)
    stats = engine.stats()
    assert stats["blocks_used"] == stats["running"] == stats["waiting"] == 0
    assert refused > 0 and stats["preemptions"] > 0 and stats["shared_tokens"] > 0          # the test was hard enough
    assert (stats["accepted"] > 0) == (speculate != "")
    assert resident_mb() - half < 30, "memory grows"
    engine.close()
