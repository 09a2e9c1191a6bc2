"""Tokens become text piece by piece, and the pieces are the text: whole characters, spaces, stop strings, places of tokens."""
import json
import random

import pytest
import small_tokenizers
from unshard.inference.chat_template import ChatTemplateError
from unshard.inference.detokenizer import Detokenizer
from unshard.inference.text_output import Sequence, StopStrings
from unshard.inference.tokenizer import Tokenizer
from unshard.inference.tokenizer_files import load_tokenizer

TEXTS = [*small_tokenizers.TEXT, "x \ufffd y", "  two leading spaces", "👩‍👩‍👧 é ñ 日本"]


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request):
    return Tokenizer(getattr(small_tokenizers, request.param)())


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer(small_tokenizers.byte_level(), small_tokenizers.TEMPLATE, {"eos_token": "<|im_end|>"})


def pieces(tokenizer, tokens, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


# ---- detokenising ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(tokenizer, text):
    tokens = tokenizer.encode(text)
    found = pieces(tokenizer, tokens)
    assert "".join(found) == text == tokenizer.decode(tokens)
    # A piece is never half of a character, which would show as U+FFFD.
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


def test_a_character_of_several_tokens_comes_with_the_last_one(tokenizer):
    tokens = tokenizer.encode("a𝄞")[-4:]
    assert [tokenizer.token_bytes(token) for token in tokens] == [b"\xf0", b"\x9d", b"\x84", b"\x9e"]
    assert pieces(tokenizer, tokens) == ["", "", "", "𝄞", ""]
    assert pieces(tokenizer, tokens[:2])[:-1] == ["", ""]           # nothing completes it: shown at the end, as what it is
    assert "\ufffd" in pieces(tokenizer, tokens[:2])[-1]


def test_random_tokens_give_what_decoding_them_at_once_gives(tokenizer):
    compared = 0
    for seed in range(400):
        chosen = random.Random(seed)
        tokens = [chosen.randrange(tokenizer.vocab) for _ in range(chosen.randrange(1, 30))]
        whole = tokenizer.decode(tokens)
        if "\ufffd" in whole and tokenizer._decoding[1]:            # <0xAB> tokens: one broken byte makes all beside it unreadable
            continue
        compared += 1
        assert "".join(pieces(tokenizer, tokens)) == whole
    assert compared > 20


def test_endless_garbage_is_shown_by_and_by(byte_level):
    half = byte_level.encode("é")[0] if len(byte_level.encode("é")) == 2 else byte_level.backend.token_to_id("Ã")
    assert byte_level.token_bytes(half) == b"\xc3"
    found = pieces(byte_level, [half] * 200)
    assert sum(map(len, found)) == 200 and sum(map(bool, found)) > 2


def test_special_tokens_are_left_out_or_shown(byte_level):
    tokens = [1, *byte_level.encode("user"), 2]
    assert "".join(pieces(byte_level, tokens)) == "user"
    assert "".join(pieces(byte_level, tokens, skip_special=False)) == "<|im_start|>user<|im_end|>"


def test_a_space_after_a_skipped_token_is_kept():
    tokenizer = Tokenizer(small_tokenizers.sentencepiece())
    quick, brown = tokenizer.encode("quick brown", add_special_tokens=False)[:1], tokenizer.encode("brown", add_special_tokens=False)
    tokens = [*quick, 2, 2, *brown]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)
    assert " " in tokenizer.decode(tokens)


def test_bytes_of_tokens_are_the_text(tokenizer):
    for text in TEXTS:
        data = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text) if token not in tokenizer.special_ids)
        assert data.decode() in (text, " " + text)                  # sentencepiece writes a space before the first word
    assert tokenizer.token_bytes(10**6) == b""


# ---- stop strings ---------------------------------------------------------------------------------------------------------------------
def in_pieces(text, stops, cuts):
    finder, out = StopStrings(stops), ""
    for begin, end in zip([0, *cuts], [*cuts, len(text)]):
        decided, stopped = finder.add(text[begin:end])
        out += decided
        if stopped:
            return out, True
    return out + finder.finish(), False


def test_the_pieces_borders_dont_matter():
    alphabet, found = "ab", 0
    for seed in range(2000):
        chosen = random.Random(seed)
        text = "".join(chosen.choice(alphabet) for _ in range(chosen.randrange(1, 14)))
        stops = ["".join(chosen.choice(alphabet) for _ in range(chosen.randrange(1, 6))) for _ in range(chosen.randrange(1, 4))]
        cuts = sorted(chosen.sample(range(len(text) + 1), chosen.randrange(0, len(text) + 1)))
        # The first place where any of them is complete; of two that end there, the longer one has the earlier beginning.
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        end, length = min(ends, default=(len(text), 0))
        out, stopped = in_pieces(text, stops, cuts)
        assert stopped == bool(ends)
        assert out in [text[:e + n] for e, n in ends if e == end] if ends else out == text
        found += stopped
    assert 500 < found < 2000


def test_only_what_may_be_a_stop_string_is_held_back():
    finder = StopStrings(["STOP", "SPAM"])
    assert finder.add("go ST") == ("go ", False)
    assert finder.add("ART") == ("START", False)
    assert finder.add("S") == ("", False)
    assert finder.add("TO") == ("", False)
    assert finder.add("P more") == ("", True)


# ---- a sequence -----------------------------------------------------------------------------------------------------------------------
def run(sequence, tokens, finish="length"):
    found = [sequence.take(token, -0.1, [(token, -0.1)], finish if i == len(tokens) - 1 else "") for i, token in enumerate(tokens)]
    return [piece for piece in found if piece]


def test_places_of_tokens_are_where_their_text_is(tokenizer):
    text = "Grüße aus Köln, 𝄞 fox"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    sequence = Sequence(tokenizer, keep_logprobs=True)
    found = run(sequence, tokens)
    assert sequence.text == "".join(piece.text for piece in found) == text
    assert [entry.token for piece in found for entry in piece.logprobs] == tokens == [entry.token for entry in sequence.logprobs]
    for entry, after in zip(sequence.logprobs, sequence.logprobs[1:]):
        own = tokenizer.token_bytes(entry.token)
        if entry.offset and own.isascii():
            assert text[entry.offset:after.offset].encode() == own


@pytest.mark.parametrize("stop", ["quick", "k b", "ck brown f", "T"])
def test_a_stop_string_ends_the_text_before_it(tokenizer, stop):
    tokens = tokenizer.encode("The quick brown fox jumps over", add_special_tokens=False)
    sequence = Sequence(tokenizer, [stop], keep_logprobs=True)
    found = run(sequence, tokens)
    assert sequence.text == "".join(piece.text for piece in found) == "The quick brown fox jumps over".partition(stop)[0]
    assert sequence.finish_reason == "stop" == found[-1].finish_reason
    assert all(entry.offset < len(sequence.text) for entry in sequence.logprobs)
    assert len(sequence.tokens) < len(tokens)                      # what the engine sent after it isn't counted


def test_the_end_token_isnt_text(byte_level):
    sequence = Sequence(byte_level, skip_special=False, keep_logprobs=True)
    run(sequence, [*byte_level.encode("fox"), 2], finish="stop")
    assert sequence.text == "fox" and sequence.tokens[-1] == 2 and sequence.finish_reason == "stop"
    assert 2 not in [entry.token for entry in sequence.logprobs]


def test_what_was_held_back_comes_at_the_end(byte_level):
    sequence = Sequence(byte_level, ["fox jumps high"])
    found = run(sequence, byte_level.encode("a quick fox jumps"))
    assert sequence.text == "a quick fox jumps" and found[-1].finish_reason == "length"
    sequence = Sequence(byte_level)
    sequence.take(-1, finish="error", error="out of memory")
    assert sequence.finish_reason == "error" and sequence.error == "out of memory" and sequence.take(5) is None


# ---- the model's files ----------------------------------------------------------------------------------------------------------------
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße!\n"}, {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "Why?"}]
TEMPLATES = {
    "plain": small_tokenizers.TEMPLATE,
    "blocks": "{%- for m in messages %}\n  {%- if loop.first %}{{ bos_token }}{% endif %}\n  [{{ m['role'] | upper }}] "
              "{{ m.content | trim }}\n{%- if loop.index is odd %}{% continue %}{% endif %}!\n{%- endfor %}\n"
              "{% generation %}x{% endgeneration %}{{ messages | tojson }}"
              "{%- if tools %}tools{% endif %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
              "{{ ns.n }}{% if thinking is defined and thinking %}<think>{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_rendered_as_transformers_does(tmp_path, name):
    from transformers import AutoTokenizer
    folder = small_tokenizers.write_folder(tmp_path / "model", template=TEMPLATES[name])
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, tmp_path / "cache")
    for options in ({}, {"thinking": True}):
        wanted = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **options)
        assert ours.chat_prompt(MESSAGES, **options) == wanted
        assert ours.chat(MESSAGES, **options) == theirs(wanted, add_special_tokens=False).input_ids
    assert ours.encode("Grüße") == theirs("Grüße").input_ids
    assert ours.special_ids == set(theirs.all_special_ids) | {0}


@pytest.mark.parametrize("template, message", [
    (small_tokenizers.TEMPLATE, "unknown role"), ("{{ messages[5].content.x }}", "no element 5"), ("{% for %}", "Expected"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"), ("{{ 1 / 0 }}", "zero"), (None, "no chat template")])
def test_a_template_that_refuses_says_why(template, message):
    tokenizer = Tokenizer(small_tokenizers.byte_level(), template)
    with pytest.raises(ChatTemplateError, match=message):
        tokenizer.chat_prompt([{"role": "wizard", "content": "x"}])


def test_a_template_reaches_nothing_outside_its_sandbox():
    tokenizer = Tokenizer(small_tokenizers.byte_level(), "{{ messages.append(1) }}")
    with pytest.raises(ChatTemplateError):
        tokenizer.chat_prompt([{"role": "user", "content": "x"}])


def test_the_second_start_needs_no_transformers(tmp_path, monkeypatch):
    folder, cache = small_tokenizers.write_folder(tmp_path / "model"), tmp_path / "cache"
    first = load_tokenizer(folder, cache)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)       # importing it fails now
    second = load_tokenizer(folder, cache)
    assert second.encode("The quick") == first.encode("The quick") and second.chat(MESSAGES) == first.chat(MESSAGES)
    (folder / "tokenizer_config.json").write_text("{}")                        # another tokenizer: what is kept isn't it
    with pytest.raises(ValueError, match="pip install transformers"):
        load_tokenizer(folder, cache)


def test_what_is_kept_may_be_damaged(tmp_path):
    folder, cache = small_tokenizers.write_folder(tmp_path / "model"), tmp_path / "cache"
    wanted = load_tokenizer(folder, cache).encode("The quick")
    for kept, text in zip([next(cache.iterdir())] * 4, ["", "{}", '{"tokenizer": "x"}', "[1]"], strict=True):
        kept.write_text(text)
        assert load_tokenizer(folder, cache).encode("The quick") == wanted
    (tmp_path / "file").write_text("")
    assert load_tokenizer(folder, tmp_path / "file").encode("The quick") == wanted     # nowhere to keep it


def test_files_that_cant_be_used_are_named_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder or file"):
        load_tokenizer(tmp_path / "absent")
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = small_tokenizers.write_folder(tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text((damaged / "tokenizer.json").read_text()[:500])
    for path in (empty, damaged):
        with pytest.raises(ValueError) as caught:
            load_tokenizer(path, tmp_path / "cache")
        assert str(caught.value).startswith(f"{path}: its tokenizer can't be read") and "\n" not in str(caught.value)


def test_a_gguf_files_tokenizer(tmp_path):
    from transformers import AutoTokenizer
    path = write_gguf(tmp_path / "tiny.gguf")
    ours = load_tokenizer(path, tmp_path / "cache")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    text = "The quick brown fox, Grüße 🎉"
    assert ours.encode(text) == theirs(text).input_ids and ours.decode(ours.encode(text)) == text
    assert ours.chat_prompt(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)


def write_gguf(path):
    import gguf
    description = json.loads(small_tokenizers.byte_level().to_str())
    vocabulary = description["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types([3 if name in small_tokenizers.SPECIAL else 1 for name in names])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in description["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(small_tokenizers.TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
