"""The FastAPI application: its paths, and what its OpenAPI page says of them."""
import contextlib
import functools

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import HTMLResponse, JSONResponse, Response

from unshard import __version__
from unshard.inference.server import documented, errors, page
from unshard.inference.server.chat import chat
from unshard.inference.server.completions import complete
from unshard.inference.server.errors import ApiError
from unshard.inference.server.gate import Gate
from unshard.inference.server.schema import ChatRequest, CompletionRequest
from unshard.inference.server.service import Service

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(model, *, name=None, api_key=None, sampling=None):
    """model: a unshard.inference.model.Model. name: what clients call it. sampling: SamplingParams' fields for requests that don't say
    them; else OpenAI's defaults. `app.state.service` is the Service."""
    service = Service(model, name, sampling)

    @contextlib.asynccontextmanager
    async def lifespan(_):
        service.start()
        yield
        await service.close()

    app = FastAPI(title="unshard", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    errors.install(app)
    _add_generation(app, service)
    _add_models(app, service)
    _add_state(app, service)
    app.add_middleware(Gate, service=service, api_key=api_key)
    app.openapi = functools.partial(_openapi, app, api_key is not None)
    return app


def _add_generation(app, service):
    def check(request):
        if request.model is not None and request.model != service.name:
            raise ApiError(404, f"there is no model {request.model[:100]!r} here; this server has {service.name!r}", param="model",
                           code="model_not_found")

    @app.post("/v1/completions", responses=documented.COMPLETION, response_class=JSONResponse)
    async def completions(body: CompletionRequest, http: Request):
        """Continue a text."""
        check(body)
        return await complete(service, body, http)

    @app.post("/v1/chat/completions", responses=documented.CHAT, response_class=JSONResponse)
    async def chat_completions(body: ChatRequest, http: Request):
        """Answer in a conversation."""
        check(body)
        return await chat(service, body, http)


def _add_models(app, service):
    def description():
        return {"id": service.name, "object": "model", "created": service.created, "owned_by": "unshard",
                "max_model_len": service.model.context}

    @app.get("/v1/models", responses=documented.GUARDED)
    async def models():
        return {"object": "list", "data": [description()]}

    @app.get("/v1/models/{name:path}", responses=documented.MODEL)
    async def model(name: str):
        if name != service.name:
            raise ApiError(404, f"there is no model {name[:100]!r} here; this server has {service.name!r}", param="model",
                           code="model_not_found")
        return description()


def _add_state(app, service):
    @app.get("/health", responses=documented.HEALTH)
    async def health():
        if service.failure is not None:
            raise ApiError(503, f"the engine failed: {service.failure}", type="unavailable", code="engine_failed")
        if service.draining:
            raise errors.draining()
        if failed := service.failures:           # the others serve on
            return {"status": "degraded", "model": service.name, "replicas": len(service.model.engines),
                    "failed": {str(replica): str(failure) for replica, failure in failed.items()}}
        return {"status": "ok", "model": service.name}

    @app.get("/metrics", response_class=Response, responses=documented.METRICS)
    async def metrics():
        return Response(service.metrics.text(), media_type=_METRICS_TYPE)

    @app.get("/live", include_in_schema=False)
    async def live():
        return {"model": service.name, "context": service.model.context, "chat": service.model.tokenizer.has_chat_template,
                "dtype": service.model.info["dtype"], "kv_dtype": service.model.info["kv_dtype"], "draining": service.draining,
                "replicas": len(service.model.engines), "failed": len(service.failures), **service.metrics.live()}

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page():
        return HTMLResponse(page.page(service.name), headers={"Content-Security-Policy": page.POLICY})


def _openapi(app, has_key):
    """FastAPI's page without its 422: a wrong value is a 400 here."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(unused, None)
        if has_key:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, operations in schema["paths"].items():
                if path.startswith("/v1"):
                    for operation in operations.values():
                        operation["security"] = [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
