"""From a submitted Job to the HTTP answer, whole or as a stream; `Shape` says how an endpoint words it."""
import time
import uuid

from starlette.responses import JSONResponse, Response

from unshard.inference.server.errors import ApiError
from unshard.inference.server.streaming import EventStream, until_gone

_NOBODY_LISTENS = 499


class Shape:
    """How one endpoint words its answers. Subclasses give `object_name`, `chunk_name`, `id_prefix` and the methods below."""

    def __init__(self, service, request):
        self.tokenizer, self.request = service.model.tokenizer, request
        self.head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}

    def choice(self, index, sequence):
        """The whole of one sequence."""
        raise NotImplementedError

    def first(self, index):
        """What a stream says of a choice before its text; None: nothing."""
        return None

    def part(self, index, piece):
        raise NotImplementedError

    def last(self, index, finish_reason):
        raise NotImplementedError

    def document(self, name, choices, **more):
        return {**self.head, "object": name, "system_fingerprint": None, "choices": choices, **more}


async def answer(job, shape, http):
    if shape.request.stream:
        return EventStream(_events(job, shape), job.close)
    try:
        done = await until_gone(http.receive, _collect(job))
    finally:
        job.close()
    if done is None:
        return Response(status_code=_NOBODY_LISTENS)
    choices = [shape.choice(index, sequence) for index, sequence in enumerate(job.sequences)]
    return JSONResponse(shape.document(shape.object_name, choices, usage=job.usage()))


async def _collect(job):
    async for _ in job.pieces():
        pass
    return True


async def _events(job, shape):
    counted = bool(shape.request.stream_options and shape.request.stream_options.include_usage)
    more = {"usage": None} if counted else {}
    for index in range(len(job.sequences)):
        if first := shape.first(index):
            yield shape.document(shape.chunk_name, [first], **more)
    try:
        async for index, piece in job.pieces():
            if piece.text or piece.logprobs:
                yield shape.document(shape.chunk_name, [shape.part(index, piece)], **more)
            if piece.finish_reason:
                yield shape.document(shape.chunk_name, [shape.last(index, piece.finish_reason)], **more)
    except ApiError as error:            # the status is sent already
        yield error.body()
        return
    if counted:
        yield shape.document(shape.chunk_name, [], usage=job.usage())
