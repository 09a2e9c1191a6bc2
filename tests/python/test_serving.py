"""The HTTP server, on a fake engine: OpenAI's client against it, its errors, clients that leave, its end."""
import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from fake_embedder import FakeEmbedder
from serving_app import make_model, serving, wait_until

FOX = "The quick brown fox jumps over the lazy dog. Grüße aus Köln 🎉. "
USER = [{"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def server():
    with serving(answer=FOX, settings={"embedder": FakeEmbedder()}) as running:
        yield running


@pytest.fixture(scope="module")
def http_client(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    import openai
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def idle(server):
    return server.engine.stats()["running"] == 0 and server.engine.stats()["waiting"] == 0 and server.service.is_idle


# ---- OpenAI's client ------------------------------------------------------------------------------------------------------------------
def test_a_completion(client, server):
    answer = client.completions.create(model="small", prompt="Say", max_tokens=12, logprobs=2)
    choice = answer.choices[0]
    assert FOX.startswith(choice.text) and choice.finish_reason == "length" and answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(server.model.tokenizer.encode("Say")), 12)
    assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.token_logprobs == [-0.5] * 12
    for token, offset, likeliest in zip(choice.logprobs.tokens, choice.logprobs.text_offset, choice.logprobs.top_logprobs, strict=True):
        assert choice.text[offset:].startswith(token) and likeliest[token] == -0.5 and len(likeliest) == 2


def test_a_completion_has_16_tokens_where_nothing_is_said(client):
    assert client.completions.create(model="small", prompt="Say").usage.completion_tokens == 16


def test_a_conversation(client, server):
    answer = client.chat.completions.create(model="small", messages=USER, max_completion_tokens=7, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and FOX.startswith(choice.message.content) and choice.finish_reason == "length"
    assert bytes(sum((entry.bytes for entry in choice.logprobs.content), [])).decode() == choice.message.content
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * 7
    prompt = server.model.tokenizer.backend.decode(server.engine.submitted[-1][1], skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_takes_what_the_context_holds_where_nothing_is_said(client, server):
    usage = client.chat.completions.create(model="small", messages=USER).usage
    assert usage.total_tokens == server.model.context


def test_text_parts_and_developers(client, server):
    client.chat.completions.create(model="small", max_tokens=1, messages=[
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    prompt = server.model.tokenizer.backend.decode(server.engine.submitted[-1][1], skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>")


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_conversation_is_the_whole_one(client, n):
    settings = {"model": "small", "messages": USER, "max_tokens": 40, "n": n, "logprobs": True}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    for index in range(n):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert own[0].delta.role == "assistant" and all(choice.delta.role is None for choice in own[1:])
        assert "".join(choice.delta.content or "" for choice in own) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
        tokens = [entry for choice in own if choice.logprobs for entry in choice.logprobs.content]
        assert tokens == whole.choices[index].logprobs.content
        assert not any("\ufffd" in (choice.delta.content or "") for choice in own)


def test_log_probabilities_of_the_prompt(client, server):
    import math
    settings = {"model": "small", "prompt": ["The quick fox", "Grüße"], "max_tokens": 3, "n": 2, "echo": True, "logprobs": 2}
    whole = client.completions.create(**settings)
    shown = [choice.logprobs.model_dump() for choice in whole.choices]
    for choice, prompt in zip(whole.choices, ["The quick fox"] * 2 + ["Grüße"] * 2, strict=True):
        tokens, found = server.model.tokenizer.encode(prompt), choice.logprobs
        assert choice.text.startswith(prompt) and len(found.tokens) == len(tokens) + 3
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None and found.token_logprobs[-3:] == [-0.5] * 3
        for at in range(1, len(tokens)):
            row = [-((tokens[at - 1] + 3 * i) % 17) for i in range(server.engine.vocab)]
            total = math.log(sum(map(math.exp, row)))
            assert abs(found.token_logprobs[at] - (row[tokens[at]] - total)) < 1e-6
            assert abs(max(found.top_logprobs[at].values()) - (max(row) - total)) < 1e-6 and 1 <= len(found.top_logprobs[at]) <= 3
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    streamed = [{} for _ in whole.choices]
    for chunk in client.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            for key, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                streamed[choice.index].setdefault(key, []).extend(values)
    assert streamed == [{key: one[key] for key in streamed[0]} for one in shown]


def test_log_probabilities_of_the_prompt_alone(client, http_client):
    settings = {"model": "small", "prompt": ["The quick fox", "Grüße"], "n": 2, "echo": True, "logprobs": 2}
    longer, alone = (client.completions.create(**settings, max_tokens=most) for most in (1, 0))
    for one, other, prompt in zip(alone.choices, longer.choices, ["The quick fox"] * 2 + ["Grüße"] * 2, strict=True):
        assert one.text == prompt and one.finish_reason == "length"
        assert one.logprobs.model_dump() == {key: values[:-1] for key, values in other.logprobs.model_dump().items()}
    assert alone.usage.completion_tokens == 0 and alone.usage.prompt_tokens == longer.usage.prompt_tokens
    chunks = list(client.completions.create(**settings, max_tokens=0, stream=True))
    assert [chunk.choices[0].text for chunk in chunks if chunk.choices[0].text] == [choice.text for choice in alone.choices]
    assert [chunk.choices[0].finish_reason for chunk in chunks[-4:]] == ["length"] * 4
    wrong(http_client.post("/v1/completions", json={"prompt": "x", "max_tokens": 0}), 400, "max_tokens")
    wrong(http_client.post("/v1/completions", json={"prompt": [10**6], "max_tokens": 0, "echo": True}), 400, "prompt")


def test_a_streamed_completion_is_the_whole_one(client):
    settings = {"model": "small", "prompt": ["One", "Two"], "max_tokens": 30, "n": 2, "echo": True}
    whole = client.completions.create(**settings)
    texts = [""] * 4
    for chunk in client.completions.create(**settings, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices] and [text[:3] for text in texts] == ["One", "One", "Two", "Two"]
    assert whole.usage.completion_tokens == 120


def test_tokens_as_prompts(client, server):
    tokens = server.model.tokenizer.encode("quick")
    assert client.completions.create(model="small", prompt=tokens, max_tokens=1).usage.prompt_tokens == len(tokens)
    answer = client.completions.create(model="small", prompt=[tokens, tokens], max_tokens=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["quickThe", "quickThe"]


@pytest.mark.parametrize("stop", ["fox", ["lazy", "own f"], "jumps over the lazy cat"])
def test_stop_strings(client, server, stop):
    settings = {"model": "small", "messages": USER, "max_tokens": 40, "stop": stop}
    whole = client.chat.completions.create(**settings)
    wanted = min((FOX.partition(s)[0] for s in ([stop] if isinstance(stop, str) else stop)), key=len)
    found = whole.choices[0].message.content
    assert found == wanted and whole.choices[0].finish_reason == "stop" if wanted != FOX else found.startswith("The quick")
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**settings, stream=True))
    assert streamed == found


def test_the_engine_is_told_when_a_stop_string_is_found():
    with serving(answer=FOX, step_s=0.002, context=100_000) as server:
        body = {"prompt": "x", "max_tokens": 50_000, "n": 2, "stop": "lazy"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).json()
        assert [choice["text"] for choice in answer["choices"]] == ["The quick brown fox jumps over the "] * 2
        wait_until(lambda: server.engine.cancelled == [1] and idle(server))


def test_what_is_asked_for_reaches_the_engine(client, server):
    client.chat.completions.create(
        model="small", messages=USER, max_tokens=3, temperature=0.5, top_p=0.9, seed=-1, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"7": -100, "9": 5}, n=2, extra_body={"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2,
                                                        "ignore_eos": True, "stop_token_ids": [5], "priority": 3})
    options = server.engine.submitted[-1][2]
    assert options == {
        "max_tokens": 3, "min_tokens": 2, "n": 2, "stop_tokens": [5], "ignore_eos": True, "priority": 3, "temperature": 0.5, "top_p": 0.9,
        "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 2**64 - 1,
        "logit_bias": {7: -100.0, 9: 5.0}, "logprobs": -1, "filters": []}


def test_the_engines_names_are_told_as_the_requests():
    from unshard.inference.server.schema import CompletionRequest
    from unshard.inference.server.service import _named_in
    request = CompletionRequest(prompt="a")
    assert _named_in("[inference.request] stop_tokens names token 7", request, "prompt") == "stop_token_ids"
    assert _named_in("[inference.request] min_tokens is 10", request, "prompt") == "min_tokens"
    assert _named_in("[inference.submit] token 7 at position 1", request, "prompt") == "prompt"


def test_what_the_models_makers_recommend_is_the_default():
    with serving(settings={"sampling": {"temperature": 0.25, "top_k": 7}}) as server:
        for body in ({}, {"temperature": 1, "top_p": 0.5}, {"temperature": None}):
            assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", **body}).status_code == 200
        asked = [[options[name] for name in ("temperature", "top_k", "top_p")] for _, _, options in server.engine.submitted]
        assert asked == [[0.25, 7, 1.0], [1.0, 7, 0.5], [0.25, 7, 1.0]]


def test_models(client, server):
    assert [model.id for model in client.models.list()] == ["small", "vectors"]
    assert client.models.retrieve("small").max_model_len == server.model.context
    import openai
    for call in (lambda: client.models.retrieve("large"), lambda: client.completions.create(model="large", prompt="x")):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found" and caught.value.param == "model"


SCHEMA = {"type": "object", "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["name", "age"], "additionalProperties": False}


def test_output_that_must_match(http_client, client):
    import re
    with serving(context=512) as random_tokens:
        own = client.with_options(base_url=f"{random_tokens.url}/v1")
        for seed in range(6):
            settings = {"model": "small", "messages": [{"role": "user", "content": str(seed)}], "max_tokens": 200}
            made = own.chat.completions.create(**settings, n=2, response_format={
                "type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}})
            for choice in made.choices:
                assert choice.finish_reason == "stop"
                value = json.loads(choice.message.content)
                assert set(value) == {"name", "age"} and value["name"] in ("fox", "dog") and 0 <= value["age"] <= 99
            made = own.chat.completions.create(**settings, extra_body={"response_format": {"type": "regex", "regex": "[0-9]{3}-(a|b)+c"}})
            text, why = made.choices[0].message.content, made.choices[0].finish_reason
            assert re.fullmatch("[0-9]{3}-(a|b)+c", text) if why == "stop" else re.match("[0-9]{3}-(a|b)*$", text)
        made = own.chat.completions.create(**settings, response_format={"type": "json_object"})
        assert made.choices[0].message.content.startswith("{")


# ---- errors ---------------------------------------------------------------------------------------------------------------------------
def wrong(response, status, param=None, code=None):
    error = response.json()["error"]
    assert response.status_code == status and set(error) == {"message", "type", "param", "code"}, response.text
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 600
    assert param is None or error["param"] == param, error
    assert code is None or error["code"] == code, error
    return error["message"]


@pytest.mark.parametrize("change, param", [
    ({"temperature": 2.5}, "temperature"), ({"temperature": "1"}, "temperature"), ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 1}, "min_p"), ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 2.5}, "max_tokens"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"), ({"seed": 1.5}, "seed"), ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"), ({"stop": [1]}, "stop"), ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"), ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"temprature": 1}, "temprature"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"response_format": {"type": "xml"}}, "response_format.type"), ({"response_format": {"type": "regex"}}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "(("}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "obj"}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://x/y"}}}}, "response_format"),
    ({"user": 5}, "user"), ({"model": 5}, "model")])
def test_a_wrong_value_is_named_by_both_endpoints(http_client, change, param):
    assert param.split(".")[0] in wrong(http_client.post("/v1/completions", json={"prompt": "x", **change}), 400, param)
    wrong(http_client.post("/v1/chat/completions", json={"messages": USER, **change}), 400, param)


@pytest.mark.parametrize("change, param", [
    ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": 5}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [99999]}, "prompt"), ({"prompt": None}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"), ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"), ({"prompt": ["x"] * 100, "n": 2}, "prompt")])
def test_a_completions_own_values(http_client, change, param):
    wrong(http_client.post("/v1/completions", json={"prompt": "x", **change}), 400, param)


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("change, param, words", [
    ({"messages": []}, "messages", ""), ({"messages": "hi"}, "messages", ""), ({"messages": [{}]}, "messages[0].role", "missing"),
    (user(None), "messages[0].content", "text"), (user([{"type": "text"}]), "messages[0].content[0].text", "missing"),
    (user([{"type": "image_url", "image_url": {"url": "http://x"}}]), "messages[0].content", "'image_url' isn't supported"),
    (user([{"type": "input_audio"}]), "messages[0].content", "'input_audio' isn't supported"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role", "tools are not supported"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", ""), ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools are not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "tools are not supported"), ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"logprobs": 1}, "logprobs", "boolean"), ({"audio": {}}, "audio", "unknown"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "")])
def test_a_conversations_own_values(http_client, change, param, words):
    assert words in wrong(http_client.post("/v1/chat/completions", json={"messages": USER, **change}), 400, param)


def test_what_asks_for_nothing_is_taken(http_client):
    nothing = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options", "tools", "functions",
                             "tool_choice", "response_format", "user", "metadata", "logprobs", "top_logprobs"))
    body = {"messages": USER, "max_tokens": 1, **nothing}
    assert http_client.post("/v1/chat/completions", json=body).status_code == 200
    body |= {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "store": False, "metadata": {"a": "b"}}
    assert http_client.post("/v1/chat/completions", json=body).status_code == 200


def test_names_of_the_template_that_are_ours_harm_nothing(http_client):
    body = {"messages": USER, "max_tokens": 2, "chat_template_kwargs": {"messages": 1, "source": 2}}
    assert http_client.post("/v1/chat/completions", json=body).status_code == 200
    body["chat_template_kwargs"] = {"self": 1}
    assert http_client.post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize("body", [
    b"", b"null", b"[]", b"5", b'"x"', b"{", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "\\ud800"}', b'{"prompt": ["a", "\\udfff"]}', b'{"prompt": "x", "\\ud800": 1}',
    b'{"prompt": "x", "stop": "\\ud800"}', b'{"prompt": "x", "seed": -99999999999999999999}',
    b'{"prompt": "x", "response_format": {"type": "regex", "regex": "\\ud800"}}',
    b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": ' + b'{"items":' * 900 + b"{}" + b"}" * 903])
def test_a_strange_body_is_the_clients_fault(http_client, body):
    for path in ("/v1/completions", "/v1/chat/completions"):
        wrong(http_client.post(path, content=body, headers={"Content-Type": "application/json"}), 400)


def test_a_body_needs_its_content_type(http_client):
    assert "Content-Type" in wrong(http_client.post("/v1/completions", content=b'{"prompt": "x"}'), 400)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(http_client, chunked):
    body = b'{"prompt": "' + b"x" * (5 << 20) + b'"}'
    content = iter([body[:1 << 20]] * 5) if chunked else body
    wrong(http_client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"}), 413)


def test_a_body_of_20_mb_gets_its_answer_too(server):
    """From a client that reads nothing before it has sent everything."""
    body = b'{"prompt": "' + b"x" * (20 << 20) + b'"}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        plain.sendall(head.encode() + body)
        assert plain.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_prompt_beyond_the_context(http_client, server):
    context = server.model.context
    for body in ({"prompt": "x" * 5000}, {"prompt": [5] * context}, {"prompt": [5] * (context - 3), "max_tokens": 4}):
        assert str(context) in wrong(http_client.post("/v1/completions", json=body), 400, "prompt", "context_length_exceeded")
    assert http_client.post("/v1/completions", json={"prompt": [5] * (context - 3), "max_tokens": 3}).status_code == 200
    wrong(http_client.post("/v1/chat/completions", json=user("x" * 5000)), 400, "messages", "context_length_exceeded")


def test_a_refusal_of_the_template_names_the_messages():
    from unshard.inference.tokenizer import Tokenizer
    import small_tokenizers
    backend = small_tokenizers.byte_level()
    for template, words in ((None, "no chat template"), ("{{ raise_exception('roles must alternate') }}", "roles must alternate")):
        with serving(make_model(Tokenizer(backend, template))) as server:
            assert words in wrong(httpx.post(f"{server.url}/v1/chat/completions", json={"messages": USER}), 400, "messages")


def test_paths_and_methods(http_client):
    wrong(http_client.get("/v2/nothing"), 404, code="unknown_url")
    wrong(http_client.get("/v1/completions"), 405, code="method_not_allowed")
    wrong(http_client.delete("/health"), 405)
    assert http_client.get("/v1/completions").headers["allow"] == "POST"


def test_the_key():
    with serving(settings={"api_key": "sécret"}) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": b"Basic s\xc3\xa9cret"}, {"Authorization": "Bearer"}):
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers=headers)
            wrong(response, 401, code="invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer sécret".encode()}
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers=right).status_code == 200
        wrong(httpx.get(f"{server.url}/v1/models"), 401)
        assert 'unshard_http_requests_total{path="/v1/completions",status="401"} 4.0' in httpx.get(f"{server.url}/metrics").text
        assert [httpx.get(server.url + path).status_code for path in ("/health", "/metrics", "/live", "/")] == [200] * 4


def test_a_full_queue_says_when_to_come_again():
    import openai
    with serving(max_waiting=1, max_sequences=1, context=4096) as server:
        server.engine.hold.set()
        with httpx.Client(base_url=server.url, timeout=20) as http:
            waiting = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": {"prompt": "x", "max_tokens": 3}})
            waiting.start()
            wait_until(lambda: server.engine.stats()["waiting"] == 1)
            response = http.post("/v1/completions", json={"prompt": "x"})
            assert "wait already" in wrong(response, 429, code="rate_limit_exceeded") and response.headers["retry-after"] == "2"
            # Of several prompts none stays behind when one is refused.
            before = len(server.engine.cancelled)
            wrong(http.post("/v1/completions", json={"prompt": ["x", "y"]}), 429)
            assert server.engine.stats()["waiting"] == 1 and len(server.engine.cancelled) == before
            server.engine.max_waiting = 2
            wrong(http.post("/v1/completions", json={"prompt": ["x", "y"]}), 429)
            assert server.engine.stats()["waiting"] == 1 and len(server.engine.cancelled) == before + 1
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as own, pytest.raises(openai.RateLimitError):
                own.completions.create(model="small", prompt=["x", "y"])
            server.engine.hold.clear()
            waiting.join(timeout=10)
        assert server.engine.stats()["refused"] == 4


def test_an_engine_that_fails_ends_its_requests():
    with serving() as server:
        server.engine.hold.set()
        found = {}

        def post(name, **more):
            found[name] = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", **more}, timeout=20)
        waiting = [threading.Thread(target=post, args=("whole",)), threading.Thread(target=post, args=("stream",), kwargs={"stream": True})]
        for thread in waiting:
            thread.start()
        wait_until(lambda: len(server.engine.submitted) == 2)
        server.engine.failure = RuntimeError("a worker died")
        for thread in waiting:
            thread.join(timeout=10)
        assert "a worker died" in wrong(found["whole"], 500)
        assert "a worker died" in json.loads(found["stream"].text.split("\n\n")[0].removeprefix("data: "))["error"]["message"]
        assert "a worker died" in wrong(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}), 503)
        assert "a worker died" in wrong(httpx.get(f"{server.url}/health"), 503)


def test_an_error_of_ours_is_in_the_same_shape(monkeypatch):
    with serving() as server:
        monkeypatch.setattr(server.service.model.tokenizer, "encode", lambda *_, **__: 1 / 0)
        assert "secret" not in wrong(httpx.post(f"{server.url}/v1/completions", json={"prompt": "secret"}), 500, code="internal_error")


# ---- clients that leave ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_client_that_leaves_frees_its_place_at_once(when, stream):
    with serving(step_s=0.01, context=100_000) as server:
        if when == "waiting":
            server.engine.hold.set()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 50_000, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: len(server.engine.submitted) == 2)
        if when == "running":
            wait_until(lambda: server.engine.stats()["running"] == 4)
            if stream:
                assert connection.getresponse().read(200).startswith(b'data: {"id":')
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        left = time.monotonic()
        wait_until(lambda: sorted(server.engine.cancelled) == [1, 2] and idle(server))
        assert time.monotonic() - left < 1
        server.engine.hold.clear()
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200


def test_openais_client_can_stop_reading(client):
    with serving(step_s=0.005, context=100_000) as server:
        own = client.with_options(base_url=f"{server.url}/v1")
        stream = own.completions.create(model="small", prompt="x", max_tokens=50_000, stream=True)
        for _ in range(3):
            next(iter(stream))
        stream.close()
        wait_until(lambda: server.engine.cancelled == [1] and idle(server))


def test_many_at_once_get_their_own_answers():
    with serving(step_s=0.001, context=400, max_waiting=1000) as server:
        async def ask(client, i):
            body = {"prompt": f"number {i}", "max_tokens": 5 + i % 30, "stream": i % 2 == 1}
            response = await client.post("/v1/completions", json=body)
            if i % 2 == 0:
                return response.json()["choices"][0]["text"]
            events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            return "".join(choice["text"] for event in events for choice in event["choices"])

        async def ask_all():
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                return await asyncio.gather(*(ask(client, i) for i in range(100)))
        answers = asyncio.run(ask_all())
        tokenizer = server.model.tokenizer
        for i, answer in enumerate(answers):
            prompt = tokenizer.encode(f"number {i}")
            assert answer == tokenizer.decode([server.engine.token_at(prompt, 0, k) for k in range(5 + i % 30)])
        wait_until(lambda: idle(server))             # a stream's end is noted when its last byte is on its way


# ---- its state ------------------------------------------------------------------------------------------------------------------------
def test_metrics(http_client, server):
    from prometheus_client.parser import text_string_to_metric_families
    http_client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
    response = http_client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {(s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(response.text) for s in family.samples}
    stats = server.engine.stats()
    assert samples["unshard_generated_tokens_total",] == stats["generated_tokens"] and samples["unshard_kv_blocks",] == 100
    assert samples["unshard_http_requests_total", "/v1/completions", "200"] >= 1
    assert samples["unshard_first_token_seconds_count",] >= 1 and samples["unshard_between_tokens_seconds_count",] >= 4
    assert samples["unshard_request_seconds_count",] >= 1 and samples["unshard_requests_running",] == 0


def test_health_and_the_figures_of_the_page(http_client):
    assert http_client.get("/health").json() == {"status": "ok", "model": "small"}
    live = http_client.get("/live").json()
    assert live["model"] == "small" and live["blocks"] == 100 and live["between_tokens_median"] > 0 and live["draining"] is False


# ---- its end --------------------------------------------------------------------------------------------------------------------------
class Program:
    """serving_app.py as a process of its own."""

    def __init__(self, **settings):
        self.process = subprocess.Popen([sys.executable, __file__.replace("test_serving.py", "serving_app.py"), json.dumps(settings)],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def end(self, limit=20):
        out, errors = self.process.communicate(timeout=limit)
        return self.process.returncode, out + errors


@pytest.mark.parametrize("stream", [False, True])
def test_sigterm_lets_what_runs_finish(stream):
    with Program(step_s=0.02, context=4096) as program, httpx.Client(base_url=program.url, timeout=20) as http:
        found = {}

        def ask():
            body = {"prompt": "x", "max_tokens": 60, "stream": stream}
            found["answer"] = httpx.post(f"{program.url}/v1/completions", json=body, timeout=20)
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: http.get("/live").json()["running"] == 1)
        program.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get("/live").json()["draining"])
        response = http.post("/v1/completions", json={"prompt": "y"})
        assert "shutting down" in wrong(response, 503, code="draining") and int(response.headers["retry-after"]) > 0
        wrong(http.get("/health"), 503)
        asking.join(timeout=15)
        code, said = program.end()
        assert (code, said) == (0, "")
        answer = found["answer"]
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n") if stream else answer.json()["usage"]["completion_tokens"] == 60
        assert not stream or '"finish_reason":"length"' in answer.text


def test_sigterm_cuts_short_what_takes_too_long():
    with Program(step_s=0.02, context=100_000, drain_timeout_s=0.3) as program:
        found = {}

        def ask(name, stream):
            body = {"prompt": "x", "max_tokens": 90_000, "stream": stream}
            found[name] = httpx.post(f"{program.url}/v1/completions", json=body, timeout=20)
        asking = [threading.Thread(target=ask, args=pair) for pair in (("whole", False), ("stream", True))]
        for thread in asking:
            thread.start()
        wait_until(lambda: httpx.get(f"{program.url}/live").json()["running"] == 2)
        began = time.monotonic()
        program.process.send_signal(signal.SIGTERM)
        code, said = program.end()
        assert (code, said) == (0, "") and time.monotonic() - began < 5
        for thread in asking:
            thread.join(timeout=10)
        wrong(found["whole"], 503, code="draining")
        assert '"code":"draining"' in found["stream"].text


def test_an_idle_server_ends_at_once():
    for number in (signal.SIGTERM, signal.SIGINT):
        with Program(drain_timeout_s=60) as program, httpx.Client(base_url=program.url) as http:
            assert http.get("/health").status_code == 200          # the connection stays open
            program.process.send_signal(number)
            assert program.end(limit=10) == (0, "")


# ---- its own description --------------------------------------------------------------------------------------------------------------
def test_the_openapi_page_says_what_is_answered(http_client):
    page = http_client.get("/openapi.json").json()
    assert set(page["paths"]) == {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/v1/models/{name}",
                                  "/health", "/metrics"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
        assert set(page["paths"][path]["post"]["responses"]) == {"200", "400", "401", "404", "413", "429", "503"}


def test_schemathesis_finds_nothing(server):
    """What it makes of our own description, right and wrong, never is a 5xx, nor anything that the description doesn't tell of."""
    import hypothesis
    import schemathesis
    from schemathesis import checks
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # A prompt that is too long, or a schema that can't be followed, is refused though the description lets it pass.
    left_out = [checks.CHECKS.get_one("positive_data_acceptance")]
    seen = []

    @hypothesis.settings(max_examples=25 * int(os.environ.get("UNSHARD_SOAK", "1")), deadline=None, derandomize=True, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(data=hypothesis.strategies.data())
    def run(operation, mode, data):
        case = data.draw(operation.as_strategy(generation_mode=mode))
        response = case.call(base_url=server.url, timeout=20)
        seen.append(response.status_code)
        case.validate_response(response, excluded_checks=left_out)

    for operation in (result.ok() for result in schema.get_all_operations()):
        run(operation, schemathesis.GenerationMode.POSITIVE)
        if operation.body:                                         # there is nothing to get wrong in the others
            run(operation, schemathesis.GenerationMode.NEGATIVE)
    assert 200 in seen and 400 in seen and max(seen) < 500
