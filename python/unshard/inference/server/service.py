"""What the endpoints share: the model, its outputs on the event loop, and whether requests are still taken."""
import asyncio
import time

from unshard.inference.dispatcher import EngineStopped
from unshard.inference.replicas import Replicas
from unshard.inference.sampling import SamplingParams
from unshard.inference.server.embedding_queue import EmbeddingQueue
from unshard.inference.server.errors import ApiError, bad_request, draining, overloaded
from unshard.inference.server.job import Job, PromptJob
from unshard.inference.server.metrics import Metrics
from unshard.inference.server.served import Served

_LONG_TEXT = 20_000             # characters; longer ones are tokenised beside the event loop
_ENGINES_NAMES = {"stop_tokens": "stop_token_ids"}
_CHARACTERS_A_TOKEN = 8         # hardly any text has more; one that does is tokenised to its end


class Service:
    """Lives on one event loop; `start` and `close` are called there."""

    def __init__(self, model, name=None, sampling=None, embedder=None, embedding_name=None, max_waiting_embeddings=1024):
        """model, embedder: one of them may be None. sampling: SamplingParams' fields for requests that don't say them."""
        self.model, self.name = model, name or (model or embedder).name
        self._defaults = dict(sampling or {})
        self.embedding_name = None if embedder is None else embedding_name or embedder.name if model else self.name
        self.served = Served(self.name if model else None, self.embedding_name)
        self.embeddings = EmbeddingQueue(embedder, max_waiting_embeddings) if embedder else None
        self.created = int(time.time())
        self.metrics = Metrics(self)
        self.draining = False
        self.dispatcher, self._loop = None, None
        self.scoring = asyncio.Lock()        # one prompt at a time is computed for its own log-probabilities
        self._jobs, self._idle = set(), asyncio.Event()
        self._idle.set()

    def start(self):
        self._loop = asyncio.get_running_loop()
        if self.model:
            self.dispatcher = Replicas(self.model.engines, self._deliver)
        if self.embeddings:
            self.embeddings.start()

    async def close(self):
        if self.embeddings:
            await asyncio.to_thread(self.embeddings.close)
        if self.model:
            await asyncio.to_thread(self.dispatcher.close)

    @property
    def failure(self):
        """What ended the engine, or the last replica of it."""
        return self.dispatcher.failure if self.dispatcher else None

    @property
    def failures(self):
        """{replica: what ended it}"""
        return self.dispatcher.failures() if self.dispatcher else {}

    def _deliver(self, batch):
        try:
            self._loop.call_soon_threadsafe(_give, batch)
        except RuntimeError:            # the loop has ended: so have the requests
            pass

    async def encode(self, text, param, **options):
        """Tokens of a prompt. Raises ApiError; a text that is far too long by its beginning alone (tokenising 4 MB takes 20 s)."""
        encode, beginning = self.model.tokenizer.encode, _CHARACTERS_A_TOKEN * self.model.context
        try:
            if len(text) <= _LONG_TEXT:
                return encode(text, **options)
            if len(text) > beginning:
                least = len(await asyncio.to_thread(encode, text[:beginning], **options)) - 8      # the cut may make some more
                if least > self.model.context:
                    raise self._too_long(f"more than {least}", None, param)
            return await asyncio.to_thread(encode, text, **options)
        except ValueError as error:
            raise bad_request(f"{param}: {error}", param, "invalid_value") from error

    async def submit(self, request, prompts, param):
        """A Job for these prompts (lists of tokens), of a request of schema.py. Raises ApiError that names `param` for the prompts."""
        most = request.most_tokens()
        sampling = self._sampling(request, 1 if most == 0 else most)
        for prompt in prompts:
            self._check_length(len(prompt), most, param)
        try:
            grammar = await asyncio.to_thread(self.model.grammar, sampling) if request.response_format else None
        except ValueError as error:
            raise bad_request(f"response_format: {error}", "response_format", "invalid_value") from error
        if self.draining:
            raise draining()
        job = (PromptJob if most == 0 else Job)(self, sampling, prompts)
        try:
            job.submit(grammar)
        except EngineStopped as error:
            raise ApiError(503, str(error), type="unavailable", code="engine_failed") from error
        except ValueError as error:
            raise bad_request(str(error), _named_in(str(error), request, param), "invalid_value") from error
        except RuntimeError as error:
            if not hasattr(error, "retry_after_s"):
                raise
            raise overloaded(error) from error
        return job

    def _sampling(self, request, most):
        try:
            options = {**self._defaults, **request.sampling_options()}
            return SamplingParams(**options, max_tokens=most, logprobs=request.logprobs_wanted())
        except ValueError as error:
            raise bad_request(str(error), code="invalid_value") from error

    def _check_length(self, prompt, most, param):
        context = self.model.context
        if prompt == 0:
            raise bad_request(f"{param}: it has no tokens", param, "invalid_value")
        least = 1 if most is None else most
        if prompt + least > context:
            raise self._too_long(prompt, most if prompt < context else None, param)

    def _too_long(self, tokens, most, param):
        more = f" and {most} more, as max_tokens says" if most else ""
        return bad_request(f"{param}: {tokens} tokens{more}; this model's context is {self.model.context} tokens, prompt and output "
                           "together", param, "context_length_exceeded")

    def began(self, job):
        self._jobs.add(job)
        self._idle.clear()

    def ended(self, job):
        self._jobs.discard(job)
        if not self._jobs:
            self._idle.set()

    @property
    def is_idle(self):
        return not self._jobs

    async def drain(self, timeout_s):
        """No new requests; returns when those that run have ended, at the latest after that time, when they are cut short."""
        self.draining = True
        waiting = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait({waiting}, timeout=timeout_s)
        waiting.cancel()
        for job in list(self._jobs):
            job.cut("the server is shutting down")


def _give(batch):
    for sink, output in batch:
        sink(output)


def _named_in(message, request, param):
    """The parameter that the engine's message is about: it begins with the option's name; else the prompt."""
    words = message.replace("[", " ").replace("]", " ").replace(":", " ").split()[:4]
    names = (_ENGINES_NAMES.get(word, word) for word in words)
    return next((name for name in names if name in type(request).model_fields), param)
