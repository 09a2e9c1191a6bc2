"""What the OpenAPI page says of answers."""
from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class CompletionAnswer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatAnswerMessage(BaseModel):
    role: str
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatAnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatAnswer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Embedding(BaseModel):
    object: str
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(BaseModel):
    object: str
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def _errors(**statuses):
    return {int(status[1:]): {"model": Error, "description": text} for status, text in statuses.items()}


def _answer(model):
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"model": model, "content": stream, "description": "The output; as server-sent events with stream: true"}}


GUARDED = _errors(_401="No or a wrong API key")
_GENERATION = GUARDED | _errors(_400="A wrong value; `param` names it", _404="No such model", _413="The body is too large",
                                _429="The queue is full; Retry-After says when to try again", _503="The server is shutting down")
COMPLETION = _answer(CompletionAnswer) | _GENERATION
CHAT = _answer(ChatAnswer) | _GENERATION
EMBEDDINGS = {200: {"model": EmbeddingAnswer, "description": "A vector of each input, in order; as base64 its float32 bytes"}} | _GENERATION
MODEL = GUARDED | _errors(_404="No such model")
HEALTH = _errors(_503="The engine failed, or the server is shutting down")
METRICS = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format"}}
