"""What `unshard.Embedder` looks like to the server, with vectors made of nothing but the tokens: for tests of what is above it."""
import hashlib
import threading
import time

import numpy


class FakeEmbedder:
    """A token a byte. `hold` stops it; it fails with `failure`, if there is one. `batches` are the lists of tokens of each call."""

    def __init__(self, name="vectors", hidden=8, context=64, shorter=(), step_s=0.0):
        self.name, self.hidden, self.context, self.step_s = name, hidden, context, step_s
        self.info = {"vocab": 256, "shorter": list(shorter), "family": "fake", "parameters": 1_000_000, "dtype": "fp32"}
        self.hold, self.failure, self.batches = threading.Event(), None, []

    def encode(self, text):
        try:
            tokens = list(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError("the text isn't Unicode") from error
        if len(tokens) > self.context:
            raise ValueError(f"a text of {len(tokens)} tokens; the model takes {self.context}")
        return tokens

    def embed_tokens(self, texts):
        self.batches.append(texts)
        while self.hold.is_set():
            time.sleep(0.002)
        time.sleep(self.step_s)
        if self.failure is not None:
            raise self.failure
        return numpy.stack([self.vector(tokens) for tokens in texts])

    def vector(self, tokens):
        seed = int.from_bytes(hashlib.sha256(repr(list(tokens)).encode()).digest()[:4], "little")
        return numpy.random.default_rng(seed).standard_normal(self.hidden).astype(numpy.float32)
