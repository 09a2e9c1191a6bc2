"""Tokenizers of the two kinds that models have, trained in a blink on the text below."""
import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = ["The quick brown fox jumps over the lazy dog. " * 3, "Grüße aus Köln, naïve café: 日本語のテキスト, привет мир, 🎉🚀 emoji 👩‍👩‍👧.",
        '{"name": "value", "list": [1, 2, 3], "nested": {"a": true, "b": null}}',
        "How vexingly quick daft zebras jump!  Two  spaces\n\tand tabs"]
TEMPLATE = ("{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
            "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def byte_level(vocab=512):
    """Like GPT-2's and Llama 3's: bytes written as characters."""
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    result.train_from_iterator(TEXT, trainer)
    return result


def sentencepiece(vocab=600):
    """Like Llama 2's and Mistral's: spaces are ▁, unknown characters bytes <0xAB>, and the first space isn't said."""
    names = ["<unk>", "<s>", "</s>"]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    letters = trainers.BpeTrainer(vocab_size=vocab - 256, special_tokens=names, show_progress=False)
    trained.train_from_iterator([text for text in TEXT if text.isascii()], letters)
    description = json.loads(trained.to_str())["model"]
    vocabulary = {name: i for i, name in enumerate([*names, *(f"<0x{b:02X}>" for b in range(256))])}
    for name in sorted(description["vocab"], key=description["vocab"].get):
        vocabulary.setdefault(name, len(vocabulary))
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in description["merges"]]
    result = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    result.normalizer = trained.normalizer
    result.add_special_tokens(names)
    result.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    result.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return result


def write_folder(folder, backend=None, template=TEMPLATE):
    """As a model's folder holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>",
              "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v}))
    return folder
