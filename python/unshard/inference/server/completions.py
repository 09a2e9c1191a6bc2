"""/v1/completions."""
from unshard.inference.server import logprobs
from unshard.inference.server.answers import Shape, answer


class Completion(Shape):
    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, service, request, prompts):
        super().__init__(service, request)
        self._echoed = [self._text(prompt) for prompt in prompts] if request.echo else []

    def _text(self, prompt):
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special=False)

    def choice(self, index, sequence):
        before = self._before(index)
        return {"index": index, "text": before + sequence.text, "logprobs": self._logprobs(sequence.logprobs, len(before)),
                "finish_reason": sequence.finish_reason}

    def first(self, index):
        before = self._before(index)
        return {"index": index, "text": before, "logprobs": None, "finish_reason": None} if before else None

    def part(self, index, piece):
        return {"index": index, "text": piece.text, "logprobs": self._logprobs(piece.logprobs, len(self._before(index))),
                "finish_reason": None}

    def last(self, index, finish_reason):
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def _before(self, index):
        return self._echoed[index // (self.request.n or 1)] if self._echoed else ""

    def _logprobs(self, entries, shift):
        return None if self.request.logprobs is None else logprobs.of_completion(self.tokenizer, entries, shift)


async def complete(service, request, http):
    request.check()
    prompts = request.prompts()
    tokens = [await service.encode(prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in prompts]
    job = await service.submit(request, tokens, "prompt")
    return await answer(job, Completion(service, request, prompts), http)
