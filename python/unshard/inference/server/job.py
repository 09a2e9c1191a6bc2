"""The generations of one HTTP request, from submitting to the last piece of text; and a request for none."""
import asyncio
import time

from unshard.inference.server.errors import ApiError
from unshard.inference.text_output import Piece, Sequence


class Job:
    """`pieces` is an asynchronous iterator of (choice, Piece). `close` the job, whatever happens."""

    def __init__(self, service, sampling, prompts):
        self._service, self._sampling, self._prompts = service, sampling, prompts
        self._began, self._last = time.monotonic(), {}
        self._outputs = asyncio.Queue()
        self._numbers = {}                   # the engine's number -> the first of its choices
        self.sequences = []
        self.prompt_tokens = sum(map(len, prompts))

    @property
    def completion_tokens(self):
        return sum(len(sequence.tokens) for sequence in self.sequences)

    def usage(self):
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens}

    def submit(self, grammar):
        """All prompts, or none."""
        service, sampling = self._service, self._sampling
        service.began(self)
        try:
            for prompt in self._prompts:
                options = service.model.request_options(sampling, grammar)
                number = service.dispatcher.submit(prompt, options, self._outputs.put_nowait)
                self._numbers[number] = len(self.sequences)
                self.sequences += [Sequence(service.model.tokenizer, sampling.stop, sampling.skip_special_tokens,
                                            sampling.logprobs is not None) for _ in range(sampling.n)]
        except BaseException:
            self.close()
            raise

    async def pieces(self):
        """Raises ApiError when the engine fails, or the server stops."""
        while self._numbers:
            output = await self._outputs.get()
            if isinstance(output, ApiError):
                raise output
            number, index, *rest = output
            if number not in self._numbers:
                continue
            first = self._numbers[number]
            choice = first + index
            sequence = self.sequences[choice]
            self._time(choice, rest[0])
            piece = sequence.take(*rest)
            if sequence.finish_reason in ("error", "cancelled"):
                raise ApiError(500, sequence.error or "the request was cancelled by the engine", code=sequence.finish_reason)
            if all(s.finish_reason for s in self.sequences[first:first + self._sampling.n]):
                del self._numbers[number]
                self._service.dispatcher.cancel(number)         # a stop string was found: the engine doesn't know
            if piece:
                yield choice, piece
        self._service.metrics.request_time.observe(time.monotonic() - self._began)

    def _time(self, choice, token):
        if token < 0:
            return
        now, metrics = time.monotonic(), self._service.metrics
        if choice in self._last:
            metrics.saw_token(now - self._last[choice])
        elif choice == 0:
            metrics.saw_first_token(now - self._began)
        self._last[choice] = now

    def cut(self, why):
        self._outputs.put_nowait(ApiError(503, why, type="unavailable", code="draining"))

    def close(self):
        """Cancels what still runs. May be called twice."""
        for number in self._numbers:
            self._service.dispatcher.cancel(number)
        self._numbers = {}
        self._service.ended(self)


class PromptJob(Job):
    """Of max_tokens 0, which evaluations ask for with echo and logprobs: the engine has nothing to do."""

    def submit(self, grammar):
        vocab = self._service.model.info["vocab"]
        if (highest := max(map(max, self._prompts))) >= vocab:
            raise ValueError(f"prompt: it names token {highest}; the vocabulary has tokens 0 to {vocab - 1}")
        self._service.began(self)
        self.sequences = [Sequence(self._service.model.tokenizer) for _ in range(len(self._prompts) * self._sampling.n)]

    async def pieces(self):
        for choice, sequence in enumerate(self.sequences):
            sequence.finish_reason = "length"
            yield choice, Piece("", [], "length")
