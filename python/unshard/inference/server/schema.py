"""What requests may hold. Values are checked here, so that an error names its parameter; types aren't converted."""
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from unshard.inference.server.errors import bad_request

MOST_CHOICES = 128              # of one request: prompts times n
MOST_INPUTS = 2048              # of one request for embeddings
_MOST_STOPS = 16
_MOST_NAMES = 100
Probability = Annotated[float, Field(ge=0, le=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}


def _several(text, most):
    """The JSON schema of what _texts() takes. text: that of one text."""
    return {"anyOf": [text, {"type": "array", "minItems": 1, "maxItems": most, "items": text},
                      _TOKENS, {"type": "array", "minItems": 1, "maxItems": most, "items": _TOKENS}]}


_PROMPT = _several({"type": "string"}, MOST_CHOICES)
_INPUT = _several({"type": "string", "minLength": 1}, MOST_INPUTS)


class Strict(BaseModel):
    """No conversions, and no unknown names: a misspelt one would change the output silently."""
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _small(cls, value):
        """pydantic makes an error for each unknown name: millions fit into a body."""
        if isinstance(value, dict) and len(value) > _MOST_NAMES:
            raise ValueError(f"{len(value)} names; there are at most {_MOST_NAMES}")
        return value


class StreamOptions(Strict):
    include_usage: bool | None = None


class JsonSchema(Strict):
    model_config = ConfigDict(protected_namespaces=())
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`regex` is an extension: {"type": "regex", "regex": "[0-9]+"}."""
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, max_length=10_000)

    @model_validator(mode="after")
    def _complete(self):
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("type json_schema needs json_schema.schema")
        if self.type == "regex" and self.regex is None:
            raise ValueError("type regex needs regex")
        return self

    def constraint(self):
        """SamplingParams' fields."""
        if self.type == "json_schema":
            return {"json_schema": self.json_schema.schema_}
        if self.type == "json_object":
            return {"json_schema": {"type": "object"}}
        return {"regex": self.regex} if self.type == "regex" else {}


class SamplingRequest(Strict):
    """What both kinds of requests share."""
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=_MOST_STOPS)] | None = None
    seed: int | None = Field(None, ge=-2**63, lt=2**63)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Bias] | None = Field(None, max_length=1024)
    response_format: ResponseFormat | None = None
    # Extensions, with the names that vLLM and others use.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, lt=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-2**31, lt=2**31)
    # Accepted, and without any effect here.
    user: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, value):
        texts = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(texts, list) or len(texts) > _MOST_STOPS or not all(isinstance(t, str) and 0 < len(t) <= 1000 for t in texts):
            raise ValueError(f"a text, or a list of at most {_MOST_STOPS} texts, of 1 to 1000 characters each")
        return value

    def check(self):
        """What concerns two fields. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options: only with stream: true", "stream_options")

    def sampling_options(self):
        """SamplingParams' fields that were given, but for max_tokens and logprobs."""
        same = ("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p",
                "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "skip_special_tokens", "priority")
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        return given | (self.response_format.constraint() if self.response_format else {})


class CompletionRequest(SamplingRequest):
    # Checked below: trying each alternative of a union on a long list of tokens takes seconds.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value):
        return _texts(value, MOST_CHOICES, "prompts")

    def check(self):
        super().check()
        if self.suffix:
            raise bad_request("suffix: filling in before a suffix is not supported by this server", "suffix")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens: 0 asks for no output; only with echo, for the prompt and its logprobs", "max_tokens",
                              "invalid_value")
        if self.best_of not in (None, self.n or 1):
            raise bad_request("best_of: choosing among more outputs than n is not supported by this server", "best_of")
        if len(self.prompts()) * (self.n or 1) > MOST_CHOICES:
            raise bad_request(f"prompt: {len(self.prompts())} prompts times n {self.n or 1} is more than {MOST_CHOICES}", "prompt")

    def most_tokens(self):
        return 16 if self.max_tokens is None else self.max_tokens

    def logprobs_wanted(self):
        return self.logprobs

    def prompts(self):
        return _listed(self.prompt)


def _tokens(values):
    return isinstance(values, list) and bool(values) and all(type(v) is int and 0 <= v < 2**31 for v in values)


def _texts(value, most, name):
    """A text, a list of texts, a list of tokens, or a list of such lists, as it is. Raises ValueError."""
    if isinstance(value, str) or _tokens(value):
        return value
    if isinstance(value, list) and len(value) > most and not isinstance(value[0], int):
        raise ValueError(f"{len(value)} {name}; there are at most {most}")
    if not isinstance(value, list) or not value or not (all(isinstance(v, str) for v in value) or all(map(_tokens, value))):
        raise ValueError("a text, a list of texts, a list of tokens, or a list of such lists; none empty")
    return value


def _listed(value):
    return [value] if isinstance(value, str) or isinstance(value[0], int) else value


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    # What an OpenAI answer's message holds beside the content, for those who send it back.
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    tool_calls: None = None
    function_call: None = None
    reasoning_content: str | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _role(cls, value):
        if value in ("tool", "function"):
            raise ValueError(f"role {value}: tools are not supported by this server")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _content(cls, value):
        if isinstance(value, list):
            for part in value:
                if not isinstance(part, dict) or part.get("type") != "text":
                    kind = part.get("type") if isinstance(part, dict) else None
                    kind = f"{kind[:40]!r} isn't supported" if isinstance(kind, str) else "a part is an object with a type"
                    raise ValueError(f"{kind}; this model reads text only: {{\"type\": \"text\", \"text\": ...}}")
        elif not isinstance(value, str):
            raise ValueError("a text, or a list of text parts")
        return value

    def plain(self):
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


_NO_TOOLS = "tools are not supported by this server; leave it out"


class ChatRequest(SamplingRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted, and without any effect here.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    # Refused, unless they ask for nothing.
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None

    @field_validator("tools", "functions", "tool_choice", "function_call", mode="before")
    @classmethod
    def _tools(cls, value):
        if value not in (None, [], "none", "auto"):
            raise ValueError(_NO_TOOLS)
        return value

    def check(self):
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs: only with logprobs: true", "top_logprobs")

    def most_tokens(self):
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def logprobs_wanted(self):
        return (self.top_logprobs or 0) if self.logprobs else None


class EmbeddingRequest(Strict):
    model: str | None = None
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    user: str | None = None             # accepted, and without any effect here

    @field_validator("input", mode="before")
    @classmethod
    def _input(cls, value):
        value = _texts(value, MOST_INPUTS, "inputs")
        if value == "" or isinstance(value, list) and "" in value:
            raise ValueError("a text is empty")
        return value

    def inputs(self):
        return _listed(self.input)
