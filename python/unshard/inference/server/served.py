"""The models that a server has, by the names that clients use, and what each is for."""
from unshard.inference.server.errors import ApiError, bad_request


class Served:
    """text, embedding: names, or None where the server has no such model."""

    def __init__(self, text, embedding):
        if text is not None and text == embedding:
            raise ValueError(f"both models are called {text!r}; name one of them otherwise (--served-model-name, --served-embedding-name)")
        self.text, self.embedding = text, embedding

    @property
    def names(self):
        return [name for name in (self.text, self.embedding) if name is not None]

    def require_known(self, asked):
        if asked is not None and asked not in self.names:
            there = " and ".join(map(repr, self.names))
            raise ApiError(404, f"there is no model {asked[:100]!r} here; this server has {there}", param="model", code="model_not_found")

    def require_text(self, asked):
        """May this name be asked for text? Raises ApiError."""
        self.require_known(asked)
        if self.text is None or asked == self.embedding is not None:
            raise bad_request(f"the model {self.embedding!r} makes embeddings, not text; ask it at /v1/embeddings"
                              + (f", or ask {self.text!r}" if self.text else ""), "model", "model_not_supported")

    def require_embeddings(self, asked):
        self.require_known(asked)
        if self.embedding is None:
            raise bad_request(f"the model {self.text!r} makes text, not embeddings; a server started with --embedding-model PATH has both",
                              "model", "model_not_supported")
        if asked == self.text is not None:
            raise bad_request(f"the model {self.text!r} makes text, not embeddings; ask {self.embedding!r}", "model", "model_not_supported")
