"""A model that is open: the engine, its tokenizer, and what is known of them."""
import concurrent.futures
import warnings

from unshard.inference import parallel
from unshard.inference.constraints import Constraints
from unshard.inference.sizes import parse_bytes, weight_cache
from unshard.inference.tokenizer_files import load_tokenizer, model_path

ENGINE_OPTIONS = ("device", "dtype", "kv_dtype", "threads", "kv_cache_tokens", "kv_cache_bytes", "step_tokens", "max_sequences",
                  "max_waiting", "max_context", "share_prefixes", "speculate", "guesses", "always_guess", "weight_memory_bytes",
                  "weight_cache")


class Model:
    """engines: one or more, which are alike; `engine` is the first."""

    def __init__(self, engines, tokenizer, name, max_context=0):
        self.engines, self.tokenizer, self.name = engines, tokenizer, name
        self.engine = engines[0]
        self.info = self.engine.model()
        _warn(name, self.info)
        self.context = min(self.info["context"], max_context or self.info["context"])     # tokens of prompt and output together
        self.constraints = Constraints(tokenizer, self.info["vocab"], self.info["end_tokens"])

    def grammar(self, sampling):
        """What the output must match, or None. Raises ValueError; up to a second of work."""
        if sampling.regex is None and sampling.json_schema is None:
            return None
        return self.constraints.compile(json_schema=sampling.json_schema, regex=sampling.regex)

    def request_options(self, sampling, grammar):
        """What InferenceEngine.submit takes; anew for each prompt, since filters remember what they saw."""
        return {**sampling.engine_options(), "filters": [] if grammar is None else [grammar.filter() for _ in range(sampling.n)]}


def _warn(name, info):
    if not info["end_tokens"]:
        warnings.warn(f"{name}: the model names no end token: its texts go on until max_tokens, unless a request brings stop or "
                      "stop_token_ids", stacklevel=3)
    if unread := info.get("unread"):
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        warnings.warn(f"{name}: tensors that nothing here computes with: {', '.join(unread[:3])}{more}; is this a model of type "
                      f"'{info['family']}', of that many layers? Its answers may be wrong", stacklevel=3)


def open_model(path, tensor_parallel=1, replicas=1, weight_memory=None, **options):
    """path: a Hugging Face folder or a GGUF file. options: of EngineOptions, by name. tensor_parallel: ranks that compute the model
    together; replicas: how many times it is held, each with weights, cache and threads of its own. This process starts the other ranks.
    weight_memory: bytes, or "2G": what weights may take on each rank; those beyond it are read from disk in each step.

    Raises ModelError (a RuntimeError), ValueError or OSError: one line. Takes as long as reading the weights."""
    unknown = sorted(set(options) - set(ENGINE_OPTIONS))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such option of the engine; there are {', '.join(ENGINE_OPTIONS)}")
    for name, value in (("tensor_parallel", tensor_parallel), ("replicas", replicas)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; a whole number of at least 1 is wanted")
    if weight_memory is not None:
        options["weight_memory_bytes"] = parse_bytes(weight_memory)
    if options.get("weight_memory_bytes"):
        options.setdefault("weight_cache", weight_cache())
    if tensor_parallel > 1 and options.get("device", "cpu") != "cpu":
        raise ValueError(f"device is {options['device']!r} and tensor_parallel {tensor_parallel}: several ranks compute on 'cpu' alone")
    path = model_path(path)
    if options.get("speculate", "") not in ("", "ngram"):
        options["speculate"] = str(_draft_path(options["speculate"]))
    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        tokenizer = aside.submit(load_tokenizer, path)       # beside the weights
        difference = aside.submit(_tokens_that_differ, tokenizer, options.get("speculate"))
        engines = parallel.open_engines(path, options, tensor_parallel, replicas)
        try:
            model = Model(engines, tokenizer.result(), path.resolve().name, options.get("max_context", 0))
            if difference.result():
                warnings.warn(f"speculate: {options['speculate']} {difference.result()}; its guesses will be wrong, which costs time "
                              f"but changes no output", stacklevel=2)
            return model
        except BaseException:
            for engine in engines:
                engine.close()
            raise


def _draft_path(asked):
    try:
        return model_path(asked)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{asked}: no such folder or file; speculate names a smaller model of the same vocabulary, or is ngram") \
            from error


def _tokens_that_differ(tokenizer, draft):
    """In words how the draft model's tokens aren't those of the model, or None: they are, or there is no draft or no tokenizer with it.
    tokenizer: a finished future."""
    if draft in (None, "", "ngram"):
        return None
    try:
        other = load_tokenizer(draft)
    except (OSError, ValueError):
        return None
    own = tokenizer.result()
    return next((f"has another tokenizer than the model: token {i} is {other.backend.id_to_token(i)!r} there and "
                 f"{own.backend.id_to_token(i)!r} here" for i in range(min(own.vocab, other.vocab))
                 if own.backend.id_to_token(i) != other.backend.id_to_token(i)), None)
