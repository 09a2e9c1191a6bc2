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
from unshard.inference.server.embeddings import embed
from unshard.inference.server.errors import ApiError
from unshard.inference.server.gate import Gate
from unshard.inference.server.schema import ChatRequest, CompletionRequest, EmbeddingRequest
from unshard.inference.server.service import Service

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(model, *, name=None, api_key=None, sampling=None, embedder=None, embedding_name=None, max_waiting_embeddings=1024):
    """model: a unshard.inference.model.Model, or None beside an embedder. embedder: an unshard.Embedder, or None. name, embedding_name:
    what clients call them (name: the embedder, where there is no model). sampling: SamplingParams' fields for requests that don't say
    them; else OpenAI's defaults. max_waiting_embeddings: requests for embeddings that may wait; more get a 429. `app.state.service` is
    the Service."""
    service = Service(model, name, sampling, embedder, embedding_name, max_waiting_embeddings)

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
    @app.post("/v1/completions", responses=documented.COMPLETION, response_class=JSONResponse)
    async def completions(body: CompletionRequest, http: Request):
        """Continue a text."""
        service.served.require_text(body.model)
        return await complete(service, body, http)

    @app.post("/v1/chat/completions", responses=documented.CHAT, response_class=JSONResponse)
    async def chat_completions(body: ChatRequest, http: Request):
        """Answer in a conversation."""
        service.served.require_text(body.model)
        return await chat(service, body, http)

    @app.post("/v1/embeddings", responses=documented.EMBEDDINGS, response_class=JSONResponse)
    async def embeddings(body: EmbeddingRequest, http: Request):
        """Vectors of texts."""
        service.served.require_embeddings(body.model)
        return await embed(service, body, http)


def _add_models(app, service):
    def description(name):
        of_text = name == service.served.text
        return {"id": name, "object": "model", "created": service.created, "owned_by": "unshard",
                "max_model_len": service.model.context if of_text else service.embeddings.embedder.context}

    @app.get("/v1/models", responses=documented.GUARDED)
    async def models():
        return {"object": "list", "data": [description(name) for name in service.served.names]}

    @app.get("/v1/models/{name:path}", responses=documented.MODEL)
    async def model(name: str):
        service.served.require_known(name)
        return description(name)


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
        model = service.model
        facts = {"context": model.context, "chat": model.tokenizer.has_chat_template, "dtype": model.info["dtype"],
                 "kv_dtype": model.info["kv_dtype"], "replicas": len(model.engines), "failed": len(service.failures)} if model else {}
        return {"model": service.name, **facts, "draining": service.draining, **service.metrics.live()}

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page():
        made = page.page(service.name) if service.model else page.embeddings_page(service.name)
        return HTMLResponse(made, headers={"Content-Security-Policy": page.POLICY})


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
