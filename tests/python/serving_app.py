"""The server on the fake engine, in this process or as a program: python serving_app.py '{"port": 0, "step_s": 0.01, ...}'."""
import contextlib
import json
import sys
import threading
import time

import small_tokenizers
from fake_engine import FakeEngine

NAME = "small"


def make_model(tokenizer=None, replicas=1, **engine):
    from unshard.inference.model import Model
    from unshard.inference.tokenizer import Tokenizer
    tokenizer = tokenizer or Tokenizer(small_tokenizers.byte_level(), small_tokenizers.TEMPLATE, {"eos_token": "<|im_end|>"})
    text = [i for i in range(tokenizer.vocab) if tokenizer.token_bytes(i).isascii() and i not in tokenizer.special_ids]
    if isinstance(engine.get("answer"), str):
        engine["answer"] = tokenizer.encode(engine["answer"])
    settings = {"vocab": tokenizer.vocab, "end_token": 2, "choices": text, **engine}
    return Model([FakeEngine(**settings) for _ in range(replicas)], tokenizer, NAME)


class Server:
    """On a thread of its own; uvicorn as it is, without signals."""

    def __init__(self, model, **settings):
        import uvicorn
        from unshard.inference.server.app import create_app
        self.model, self.app = model, create_app(model, **settings)
        self._uvicorn = uvicorn.Server(uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="error", lifespan="on",
                                                      timeout_graceful_shutdown=2))
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._uvicorn.started)
        self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine = model.engines[0] if model else None
        self.service = self.app.state.service

    def close(self):
        self._uvicorn.should_exit = True
        self._thread.join(timeout=10)


@contextlib.contextmanager
def serving(model=None, settings=None, **engine):
    server = Server(model or make_model(**engine), **(settings or {}))
    try:
        yield server
    finally:
        server.engine.hold.clear()
        server.close()


def wait_until(what, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "it didn't come about in time"
        time.sleep(0.002)


def main(settings):
    from unshard.inference.server.app import create_app
    from unshard.inference.server.run import serve
    port, drain_timeout_s = settings.pop("port", 0), settings.pop("drain_timeout_s", 10.0)
    serve(create_app(make_model(**settings)), port=port, drain_timeout_s=drain_timeout_s, ready=lambda port: print(port, flush=True))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
