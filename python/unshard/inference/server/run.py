"""Runs the server until SIGTERM or SIGINT, then lets what runs finish."""
import asyncio
import contextlib
import signal
import socket

import uvicorn

_WATCH_S = 0.5
_CLOSE_S = 5                    # for answers that are being written when the drain is over


class _Server(uvicorn.Server):
    """uvicorn stops listening at once when a signal comes; here new requests get a 503 while running ones finish."""

    def __init__(self, config, service, drain_timeout_s, on_ready):
        super().__init__(config)
        self._service, self._drain_timeout_s, self._draining, self._on_ready = service, drain_timeout_s, None, on_ready
        self._watching, self.failure = None, None

    async def startup(self, sockets=None):
        await super().startup(sockets)
        if self.started:
            self._watching = asyncio.ensure_future(self._watch())
            self._on_ready()

    async def _watch(self):
        """A server whose engine has failed (a rank is gone, say) ends, so that whoever started it sees that."""
        while (failure := self._service.failure) is None:
            await asyncio.sleep(_WATCH_S)
        await asyncio.sleep(_WATCH_S)            # the requests' errors go out first
        self.failure = failure
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self):
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self):
        if self._draining is not None:       # the second signal: now
            self.should_exit = self.force_exit = True
            return
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self):
        await self._service.drain(self._drain_timeout_s)
        self.should_exit = True


def serve(app, *, host="127.0.0.1", port=8000, drain_timeout_s=30.0, ready=None):
    """Blocks. port 0: a free one. ready: called with the port when requests are taken. Raises OSError if the port can't be had,
    RuntimeError when the engine fails."""
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=_CLOSE_S,
                            lifespan="on", server_header=False)
    sock = _listen(host, port)
    server = _Server(config, app.state.service, drain_timeout_s, lambda: ready and ready(sock.getsockname()[1]))
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
    if server.failure is not None:
        raise RuntimeError(f"the engine failed: {server.failure}")


def _listen(host, port):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(f"can't listen on {host}, port {port}: {error.strerror or error}") from error
    return sock
