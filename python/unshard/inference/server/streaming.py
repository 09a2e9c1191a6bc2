"""Answers that stop as soon as nobody listens any more."""
import asyncio
import json

from starlette.responses import Response


async def until_gone(receive, work):
    """The result of the coroutine `work`; None, and it is cancelled, if the client goes away first.

    receive: the ASGI channel, from which the body has been read: what comes next is the disconnect."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: each thing that the asynchronous generator `events` yields, as JSON, then [DONE].

    Starlette's StreamingResponse sees a client's leaving only when it sends; here the generator ends at once."""
    media_type = "text/event-stream"

    def __init__(self, events, on_end):
        self._on_end = on_end                # called in any case, also when not one event was asked for
        self.status_code, self.background, self._events = 200, None, events
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope, receive, send):
        try:
            await until_gone(receive, self._send(send))
        except OSError:               # the connection broke while sending
            pass
        finally:
            await self._events.aclose()
            self._on_end()

    async def _send(self, send):
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": b"data: " + _json(event) + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _json(event):
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
