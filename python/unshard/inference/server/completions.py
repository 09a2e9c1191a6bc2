"""/v1/completions."""
from unshard.inference.server import logprobs
from unshard.inference.server.answers import Shape, answer
from unshard.inference.server.echoed import scored


class Completion(Shape):
    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, service, request, prompts, prompt_logprobs):
        """prompt_logprobs: of echo with logprobs, else empty."""
        super().__init__(service, request)
        self._prompt_logprobs = prompt_logprobs
        self._echoed = [self._text(prompt) for prompt in prompts] if request.echo else []

    def _text(self, prompt):
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special=False)

    def choice(self, index, sequence):
        before = self._before(index)
        entries = self._logprobs(sequence.logprobs, len(before))
        if self._prompt_logprobs:
            entries = {key: values + entries[key] for key, values in self._of_prompt(index).items()}
        return {"index": index, "text": before + sequence.text, "logprobs": entries, "finish_reason": sequence.finish_reason}

    def first(self, index):
        before = self._before(index)
        if not before:
            return None
        entries = self._of_prompt(index) if self._prompt_logprobs else None
        return {"index": index, "text": before, "logprobs": entries, "finish_reason": None}

    def part(self, index, piece):
        return {"index": index, "text": piece.text, "logprobs": self._logprobs(piece.logprobs, len(self._before(index))),
                "finish_reason": None}

    def last(self, index, finish_reason):
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def _before(self, index):
        return self._echoed[index // (self.request.n or 1)] if self._echoed else ""

    def _of_prompt(self, index):
        return self._logprobs(self._prompt_logprobs[index // (self.request.n or 1)], 0)

    def _logprobs(self, entries, shift):
        return None if self.request.logprobs is None else logprobs.of_completion(self.tokenizer, entries, shift)


async def complete(service, request, http):
    request.check()
    prompts = request.prompts()
    tokens = [await service.encode(prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in prompts]
    job = await service.submit(request, tokens, "prompt")
    try:
        wanted = request.echo and request.logprobs is not None
        prompt_logprobs = await scored(service, tokens, request.logprobs) if wanted else []
    except BaseException:
        job.close()
        raise
    return await answer(job, Completion(service, request, prompts, prompt_logprobs), http)
