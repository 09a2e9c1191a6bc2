"""/v1/chat/completions."""
from unshard.inference.chat_template import ChatTemplateError
from unshard.inference.server import logprobs
from unshard.inference.server.answers import Shape, answer
from unshard.inference.server.errors import bad_request


class Chat(Shape):
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def choice(self, index, sequence):
        return {"index": index, "message": {"role": "assistant", "content": sequence.text, "refusal": None},
                "logprobs": self._logprobs(sequence.logprobs), "finish_reason": sequence.finish_reason}

    def first(self, index):
        return self._chunk(index, {"role": "assistant", "content": ""})

    def part(self, index, piece):
        return self._chunk(index, {"content": piece.text}, self._logprobs(piece.logprobs))

    def last(self, index, finish_reason):
        return self._chunk(index, {}, finish_reason=finish_reason)

    def _chunk(self, index, delta, logprobs=None, finish_reason=None):
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, entries):
        return logprobs.of_chat(self.tokenizer, entries) if self.request.logprobs else None


async def chat(service, request, http):
    request.check()
    messages = [message.plain() for message in request.messages]
    try:
        text = service.model.tokenizer.chat_prompt(messages, **(request.chat_template_kwargs or {}))
    except ChatTemplateError as error:
        raise bad_request(str(error)[:500], "messages", "invalid_value") from error
    tokens = await service.encode(text, "messages", add_special_tokens=False)
    job = await service.submit(request, [tokens], "messages")
    return await answer(job, Chat(service, request), http)
