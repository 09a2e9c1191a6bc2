"""The terminal's side of embeddings: what `unshard embed` prints, and which models `unshard serve` opens."""
import json
import sys
import time

_SHARED = ("dtype", "threads", "max_context")              # options of an engine that an embedder has too
_SPELT = {"tensor_parallel": "tp", "share_prefixes": "no_share_prefixes"}  # on the command line, where that differs
_IN_LINES = 256                                            # texts computed before their vectors are written


def _lines(texts):
    for text in texts:
        if text != "-":
            yield text
            continue
        for line in sys.stdin:
            yield line.rstrip("\n")


def show(embedder, texts, truncate):
    """Vectors of these texts to standard output as they come; "-" stands for the lines of standard input."""
    began, count, tokens, batch = time.perf_counter(), 0, 0, []

    def write():
        for vector in embedder.embed_tokens(batch):
            print(json.dumps(vector.tolist(), separators=(",", ":")))
        batch.clear()
    for text in _lines(texts):
        try:
            batch.append(embedder.encode(text, truncate))
        except ValueError as error:
            raise ValueError(f"text {count + 1}: {error}; --truncate cuts it") from error
        count, tokens = count + 1, tokens + len(batch[-1])
        if len(batch) == _IN_LINES:
            write()
    write()
    sys.stdout.flush()
    rate = f"{count / (time.perf_counter() - began):.1f} texts/s"
    print(f"[{count} texts, {tokens} tokens, {rate}; vectors of {embedder.hidden} numbers, {embedder.info['pooling']} of the rows]",
          file=sys.stderr)


def open_served(options, given):
    """(Model or None, Embedder or None) of `unshard serve`'s options. given: those of the engine that were given, by name."""
    from unshard.inference.embedder import Embedder, makes_embeddings
    from unshard.inference.model import open_model
    if makes_embeddings(options.model):
        if options.embedding_model:
            raise ValueError(f"{options.model} makes embeddings itself; --embedding-model goes beside a model that makes text")
        if unfit := sorted(set(given) - {*_SHARED, "max_waiting"}):
            names = ", ".join("--" + _SPELT.get(name, name).replace("_", "-") for name in unfit)
            raise ValueError(f"{options.model} makes embeddings, for which these options aren't built: {names}")
        return None, Embedder(options.model, **{name: given[name] for name in _SHARED if name in given})
    embedder = None
    if options.embedding_model:
        embedder = Embedder(options.embedding_model, dtype=options.embedding_dtype, threads=given.get("threads", 0))
    return open_model(options.model, **given), embedder
