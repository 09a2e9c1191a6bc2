"""What every request passes first: the key, the size of its body, and whether the server still takes work."""
import asyncio
import hmac

from starlette.exceptions import HTTPException

from unshard.inference.server.errors import ApiError, draining

_GUARDED = "/v1"
_DISCARD_S = 10


class Gate:
    """ASGI middleware. Only paths below /v1 need the key: health, metrics and the page hold no text of anybody's."""

    def __init__(self, app, service, api_key=None, most_body_bytes=4 << 20):
        self._app, self._service, self._most = app, service, most_body_bytes
        self._key = api_key.encode() if api_key else None

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def counted(message):
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._service.metrics.requests.labels(_label(scope), str(message["status"])).inc()
            await send(message)
        try:
            self._check(scope)
            await self._check_length(scope, receive)
            await self._app(scope, self._limited(receive), counted)
        except ApiError as error:
            if started:
                raise
            await error.response()(scope, receive, counted)

    async def _discard(self, receive):
        """Clients that send everything before they read would get a broken connection instead of the answer. Nothing is kept of it."""
        async def read():
            while (await receive()).get("more_body"):
                pass
        await asyncio.wait({asyncio.ensure_future(read())}, timeout=_DISCARD_S)

    def _check(self, scope):
        headers = dict(scope["headers"])
        if not scope["path"].startswith(_GUARDED):
            return
        if self._key is not None:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                raise ApiError(401, "no or a wrong API key; send the header Authorization: Bearer KEY", code="invalid_api_key",
                               headers={"WWW-Authenticate": "Bearer"})
        if self._service.draining and scope["method"] == "POST":
            raise draining()

    async def _check_length(self, scope, receive):
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._most:
            await self._discard(receive)
            raise ApiError(413, self._too_large, code="body_too_large", headers={"Connection": "close"})

    @property
    def _too_large(self):
        return f"the body is larger than {self._most} bytes"

    def _limited(self, receive):
        seen = 0

        async def limited():
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                await self._discard(receive)
                raise HTTPException(413, self._too_large)        # FastAPI, which is reading, takes any other for broken JSON
            return message
        return limited


def _label(scope):
    """The path's pattern: there must be few. What is refused here has no route yet."""
    if route := scope.get("route"):
        return route.path
    return scope["path"] if scope["path"] in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings") else "other"
