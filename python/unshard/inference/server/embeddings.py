"""/v1/embeddings."""
import asyncio
import base64
import json
import time

import numpy
from starlette.responses import Response

from unshard.inference.server.embedding_queue import QueueFull
from unshard.inference.server.errors import ApiError, bad_request, draining, overloaded
from unshard.inference.server.streaming import until_gone

_LONG = 20_000                  # characters, or numbers of an answer: from there on work goes beside the event loop
_NOBODY_LISTENS = 499


async def embed(service, request, http):
    inputs, embedder = request.inputs(), service.embeddings.embedder
    dimensions = _dimensions(request, embedder)
    large = sum(map(len, inputs)) > _LONG
    texts = await asyncio.to_thread(_tokens, embedder, inputs) if large else _tokens(embedder, inputs)
    job = _Job(service, texts)
    try:
        vectors = await until_gone(http.receive, job.vectors())
    finally:
        job.close()
    if vectors is None:
        return Response(status_code=_NOBODY_LISTENS)
    words = (service.embedding_name, vectors, dimensions, request.encoding_format or "float", sum(map(len, texts)))
    body = await asyncio.to_thread(_body, *words) if vectors.size > _LONG else _body(*words)
    return Response(body, media_type="application/json")


def _dimensions(request, embedder):
    """How long vectors are wanted. Raises ApiError where the model's can't be cut there."""
    wanted, shorter = request.dimensions or embedder.hidden, embedder.info["shorter"]
    if wanted != embedder.hidden and wanted not in shorter:
        those = f"{', '.join(map(str, [*shorter, embedder.hidden]))}" if shorter else f"{embedder.hidden} only, and can't be cut"
        raise bad_request(f"dimensions: {wanted}; this model's vectors have {those}", "dimensions", "invalid_value")
    return wanted


def _tokens(embedder, inputs):
    """Lists of tokens that the model takes. Raises ApiError that names the input."""
    texts = []
    for number, each in enumerate(inputs):
        where = f"input[{number}]" if len(inputs) > 1 else "input"
        try:
            tokens = embedder.encode(each) if isinstance(each, str) else each
        except ValueError as error:
            raise bad_request(f"{where}: {error}", "input", "invalid_value") from error
        if not tokens:
            raise bad_request(f"{where}: it has no tokens", "input", "invalid_value")
        if len(tokens) > embedder.context:
            raise bad_request(f"{where}: {len(tokens)} tokens; the model takes {embedder.context}", "input", "context_length_exceeded")
        if max(tokens) >= embedder.info["vocab"]:
            raise bad_request(f"{where}: token {max(tokens)} isn't in the vocabulary of {embedder.info['vocab']}", "input", "invalid_value")
        texts.append(tokens)
    return texts


class _Job:
    """One request in the queue. The service counts it among those that run."""

    def __init__(self, service, texts):
        if service.draining:
            raise draining()
        self._service, self._began, self._loop = service, time.monotonic(), asyncio.get_running_loop()
        self._result = self._loop.create_future()
        try:
            self._request = service.embeddings.submit(texts, self._done)
        except QueueFull as error:
            raise overloaded(error) from error
        service.began(self)

    async def vectors(self):
        found = await self._result
        if isinstance(found, ApiError):
            raise found
        if isinstance(found, Exception):
            raise ApiError(500, f"the embeddings failed: {type(found).__name__}: {found}", code="error")
        self._service.metrics.embedding_time.observe(time.monotonic() - self._began)
        return found

    def _done(self, found):
        try:
            self._loop.call_soon_threadsafe(self._give, found)
        except RuntimeError:            # the loop has ended: so has the request
            pass

    def _give(self, found):
        if not self._result.done():
            self._result.set_result(found)

    def cut(self, why):
        self._give(ApiError(503, why, type="unavailable", code="draining"))

    def close(self):
        self._service.embeddings.cancel(self._request)
        self._service.ended(self)


def _body(name, vectors, dimensions, encoding, tokens):
    """The answer as JSON. A vector at a time: while one long json.dumps runs, no other thread does."""
    if dimensions < vectors.shape[1]:
        vectors = vectors[:, :dimensions]
        vectors = vectors / numpy.maximum(numpy.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    parts = []
    for index, vector in enumerate(vectors.astype("<f4")):
        value = base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector.tolist()
        parts.append(json.dumps({"object": "embedding", "index": index, "embedding": value}, separators=(",", ":")))
    usage = json.dumps({"prompt_tokens": tokens, "total_tokens": tokens}, separators=(",", ":"))
    return f'{{"object":"list","data":[{",".join(parts)}],"model":{json.dumps(name)},"usage":{usage}}}'.encode()
