"""Every error has OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""
import json
import math
import re

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response


class ApiError(Exception):
    """Ends a request with this status."""

    def __init__(self, status, message, *, param=None, code=None, type=None, headers=None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")

    def body(self):
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def response(self):
        # ASCII: a client's own text may be in it, half a surrogate pair too, which UTF-8 can't hold.
        return Response(json.dumps(self.body()), self.status, self.headers, media_type="application/json")


def bad_request(message, param=None, code=None):
    return ApiError(400, message, param=param, code=code)


def overloaded(error):
    """Of the engine's Overloaded."""
    wait = str(max(1, math.ceil(error.retry_after_s)))
    return ApiError(429, f"{error}; try again in {wait} s", type="overloaded", code="rate_limit_exceeded", headers={"Retry-After": wait})


def draining():
    return ApiError(503, "the server is shutting down and takes no new requests", type="unavailable", code="draining",
                    headers={"Retry-After": "5"})


def install(app):
    @app.exception_handler(ApiError)
    async def api_error(_, error):
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def wrong_value(_, error):
        return _of_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http_error(request, error):
        return _of_http(request, error).response()

    @app.exception_handler(Exception)
    async def own_fault(_, error):           # it is raised again afterwards, and logged
        return ApiError(500, f"an error in the server: {type(error).__name__}", code="internal_error").response()


def _of_http(request, error):
    if error.status_code == 404:
        return ApiError(404, f"no such path: {request.method} {request.url.path}", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, f"{request.url.path} doesn't take {request.method}", code="method_not_allowed", headers=error.headers)
    if error.status_code == 413:
        return ApiError(413, error.detail, code="body_too_large", headers={"Connection": "close"})
    if error.status_code == 400:             # FastAPI's, of a body that Python's JSON gives up on
        return bad_request("the body can't be read as JSON: not UTF-8, nested too deep, or a number too long")
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def _of_validation(problems):
    """The first problem, in the words that name the parameter. What the client sent isn't repeated: it may be huge."""
    first = max(problems, key=lambda problem: len(problem["loc"]))      # of alternatives, the one that fits best
    where = [part for part in first["loc"] if part != "body"]
    if first["type"] in ("json_invalid", "model_attributes_type", "dict_type") and not [p for p in where if isinstance(p, str)]:
        return bad_request("the body isn't a JSON object; send one, with the header Content-Type: application/json")
    param = _path(where)
    if first["type"] == "extra_forbidden":
        return bad_request(f"unknown parameter: {param}", param, "unknown_parameter")
    if first["type"] == "missing":
        text = f"{param} is missing" if param else "the body is missing; send a JSON object"
        return bad_request(text, param, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{param}: {message}" if param else message, param, "invalid_value")


_ALTERNATIVES = re.compile(r"str|(list|dict)\[.*\]|constrained-.*|function-.*|\[key\]")     # pydantic's names, not the client's


def _path(parts):
    text = ""
    for part in parts:
        if isinstance(part, str) and _ALTERNATIVES.fullmatch(part):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text[:200] or None
