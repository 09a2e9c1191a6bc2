"""`unshard.Embedder`: vectors of texts, by an encoder, in Python.

    with unshard.Embedder("path/of/model") as embedder:
        vectors = embedder.embed(["The cat sleeps.", "A cat is asleep."])        # float32 [2, hidden]
"""
import numpy

from unshard.inference.tokenizer_files import load_tokenizer, model_path

OPTIONS = ("dtype", "threads", "batch_tokens", "max_context")
_LONG_TEXT = 20_000             # characters; of longer ones a part is tokenised first
_CHARACTERS_A_TOKEN = 8


class Embedder:
    """model: the Hugging Face folder of an encoder (BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT), with sentence-transformers' files
    beside it or without. options: dtype, threads, batch_tokens, max_context (unshard/inference/embedder.h says what they mean).

    Any thread may use it. Raises ModelError (a RuntimeError), ValueError, OSError."""

    def __init__(self, model, **options):
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no such option of an embedder; there are {', '.join(OPTIONS)}")
        path = model_path(model)
        self._encoder = _binding().InferenceEmbedder(str(path), **options)
        self.info, self.name = self._encoder.model(), path.resolve().name
        self.context, self.hidden = self.info["context"], self.info["hidden"]       # tokens of a text at most; length of a vector
        self.tokenizer = load_tokenizer(path)

    def embed(self, texts, *, truncate=False):
        """Vectors, float32 [texts, hidden], in order.

        texts: a text, a list of texts, a list of tokens, or a list of lists of tokens (which are taken as they are). truncate: too long
        texts are cut, as sentence-transformers does. Raises ValueError: a text is too long, or empty and without tokens."""
        return self.embed_tokens([self.encode(text, truncate) if isinstance(text, str) else list(text) for text in _several(texts)])

    def embed_tokens(self, texts):
        """The same of lists of tokens."""
        bytes_of_all = self._open().embed(texts)
        return numpy.frombuffer(bytearray(bytes_of_all), dtype="<f4").reshape(len(texts), self.hidden)

    def encode(self, text, truncate=False):
        """Tokens of a text, with those that the model wants around it. Raises ValueError, for a text that is far too long by its
        beginning alone."""
        beginning = text[:_CHARACTERS_A_TOKEN * self.context]
        if truncate:
            return self.tokenizer.encode(text, at_most=self.context)
        if len(text) > max(_LONG_TEXT, len(beginning)):
            least = len(self.tokenizer.encode(beginning)) - 8          # the cut may make some more
            if least > self.context:
                raise self._too_long(f"more than {least}")
        tokens = self.tokenizer.encode(text)
        if len(tokens) > self.context:
            raise self._too_long(len(tokens))
        return tokens

    def _too_long(self, tokens):
        return ValueError(f"a text of {tokens} tokens; the model takes {self.context}")

    def _open(self):
        if self._encoder is None:
            raise ValueError("the embedder was closed")
        return self._encoder

    def close(self):
        """Gives the model's memory back. May be called twice."""
        self._encoder = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def makes_embeddings(path):
    """Is this the folder of an encoder, to be opened by Embedder and not by LLM?"""
    return _binding().InferenceEmbedder.takes(str(model_path(path)))


def _binding():
    from unshard import _inference                           # which needs no torch
    return _inference


def _several(texts):
    if isinstance(texts, str):
        return [texts]
    texts = list(texts)
    return [texts] if texts and isinstance(texts[0], int) else texts
