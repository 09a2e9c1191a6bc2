"""Texts of all requests to vectors: a thread of its own takes what has come, some of each request a turn, so that a large one keeps no
small one waiting."""
import collections
import dataclasses
import threading
import time
from collections.abc import Callable

import numpy

_TURN_TOKENS = 2048             # computed before those that came meanwhile get their turn
_MOST_WAITING_TOKENS = 1 << 20


class QueueFull(RuntimeError):
    def __init__(self, text, retry_after_s):
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclasses.dataclass(eq=False)
class _Request:
    texts: list                     # of lists of tokens
    done: Callable                  # done(vectors or an exception), on the queue's thread
    vectors: numpy.ndarray
    begun: int = 0                  # texts taken into turns so far
    ended: bool = False

    tokens_left = property(lambda self: sum(map(len, self.texts[self.begun:])))


class EmbeddingQueue:
    """embedder: an unshard.Embedder. max_waiting: requests that may wait or be computed; more are refused with QueueFull."""

    def __init__(self, embedder, max_waiting=1024):
        self.embedder, self._max_waiting = embedder, max_waiting
        self._waiting, self._waiting_tokens = collections.deque(), 0         # requests with texts that no turn has taken yet
        self._open = 0                                                       # requests that haven't been answered
        self._counts = dict.fromkeys(("texts", "tokens", "turns", "refused", "cancelled"), 0) | {"busy_s": 0.0}
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="unshard-embeddings", daemon=True)

    def start(self):
        self._thread.start()

    def submit(self, texts, done):
        """texts: lists of tokens that the model takes. A handle for cancel(). Raises QueueFull."""
        request = _Request(texts, done, numpy.empty((len(texts), self.embedder.hidden), numpy.float32))
        tokens = request.tokens_left
        with self._lock:
            if self._open >= self._max_waiting or self._waiting_tokens and self._waiting_tokens + tokens > _MOST_WAITING_TOKENS:
                self._counts["refused"] += 1
                raise QueueFull(f"{self._open} requests of {self._waiting_tokens} tokens wait already", self._wait_s())
            self._open += 1
            self._waiting.append(request)
            self._waiting_tokens += tokens
            self._news.notify()
        return request

    def cancel(self, request):
        """Nothing more of it is computed, and `done` isn't called (but for a call that is under way)."""
        with self._lock:
            if self._end(request):
                self._counts["cancelled"] += 1

    def stats(self):
        with self._lock:
            return {**self._counts, "waiting": self._open, "waiting_tokens": self._waiting_tokens}

    def close(self):
        """After the turn under way; what waits gets an error. May be called twice."""
        with self._lock:
            self._closing = True
            self._news.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._fail(list(self._waiting), RuntimeError("the server is shutting down"))

    def _run(self):
        while True:
            with self._lock:
                while not self._waiting and not self._closing:
                    self._news.wait()
                if self._closing:
                    return
                turn = self._take()
            self._compute(turn)

    def _take(self):
        """(request, text) pairs of one turn: one text of each request, and again, until the turn is full."""
        turn, left = [], _TURN_TOKENS
        while self._waiting and (left > 0 or not turn):
            request = self._waiting.popleft()
            turn.append((request, request.begun))
            left -= len(request.texts[request.begun])
            self._waiting_tokens -= len(request.texts[request.begun])
            request.begun += 1
            if request.begun < len(request.texts):
                self._waiting.append(request)
        return turn

    def _compute(self, turn):
        began = time.monotonic()
        try:
            vectors = self.embedder.embed_tokens([request.texts[text] for request, text in turn])
        except Exception as error:           # too little memory, say: these requests end, later ones are tried
            self._fail({id(request): request for request, _ in turn}.values(), error)
            return
        done = []
        for (request, text), vector in zip(turn, vectors, strict=True):
            request.vectors[text] = vector
            if text + 1 == len(request.texts):
                done.append(request)
        with self._lock:
            counts = self._counts
            counts["texts"] += len(turn)
            counts["tokens"] += sum(len(request.texts[text]) for request, text in turn)
            counts["turns"] += 1
            counts["busy_s"] += time.monotonic() - began
            done = [request for request in done if self._end(request)]
        for request in done:
            request.done(request.vectors)

    def _fail(self, requests, error):
        with self._lock:
            ended = [request for request in requests if self._end(request)]
        for request in ended:
            request.done(error)

    def _end(self, request):
        """False: it has ended before."""
        if request.ended:
            return False
        request.ended = True
        self._open -= 1
        if request.begun < len(request.texts):
            self._waiting.remove(request)
            self._waiting_tokens -= request.tokens_left
        return True

    def _wait_s(self):
        busy, tokens = self._counts["busy_s"], self._counts["tokens"]
        return max(1.0, min(60.0, self._waiting_tokens * busy / tokens if tokens else 1.0))
