"""Several engines behind one queue: who gets a request, what becomes of it when its engine fails, and what the server says of that."""
import gc
import json
import threading

import httpx
import pytest
from fake_engine import FakeEngine, Overloaded
from inference_models import save_tiny
from prometheus_client.parser import text_string_to_metric_families
from serving_app import make_model, serving, wait_until
from unshard.inference.dispatcher import Dispatcher, EngineStopped
from unshard.inference.llm import LLM
from unshard.inference.replicas import Replicas

ASK = {"max_tokens": 8, "n": 1}


@pytest.fixture
def two():
    engines = [FakeEngine(), FakeEngine()]
    replicas = Replicas(engines)
    yield replicas, engines
    for engine in engines:
        engine.hold.clear()
    replicas.close()


def taken(engines):
    return [len(engine.submitted) for engine in engines]


# ---- routing --------------------------------------------------------------------------------------------------------------------------
def test_answers_are_those_of_one_engine_and_the_load_is_spread():
    with LLM.of(make_model(replicas=3)) as llm:
        prompts = [[5, i, i + 1] for i in range(60)]
        results = llm.generate(prompts, max_tokens=10, n=2)
        for prompt, result in zip(prompts, results, strict=True):
            assert [s.tokens for s in result.sequences] == [[llm.model.engine.token_at(prompt, i, k) for k in range(10)] for i in range(2)]
        assert sum(taken(llm.model.engines)) == 60 and min(taken(llm.model.engines)) >= 10
        assert llm.stats()["finished"] == 60 and llm.stats()["block_tokens"] == 16


def test_the_one_with_fewest_tokens_to_compute_is_chosen(two):
    replicas, engines = two
    for engine in engines:
        engine.hold.set()
    replicas.submit([1] * 100, ASK, print)                         # 108 tokens: the next ones go elsewhere until there are as many
    for i in range(5):
        replicas.submit([2 + i] * 10, ASK, print)                  # 18 each
    assert taken(engines) == [1, 5]
    replicas.submit([9] * 10, ASK, print)
    assert taken(engines) == [1, 6]                                # 90 were there
    replicas.submit([10] * 10, ASK, print)
    assert taken(engines) == [2, 6]                                # both have 108


def test_a_prompt_goes_where_its_beginning_is_unless_much_waits_there(two):
    replicas, engines = two
    done = threading.Semaphore(0)
    beginning = [7] * 160
    for i in range(6):
        replicas.submit([*beginning, *[i] * 20], ASK, lambda output: output[5] and done.release())
        assert done.acquire(timeout=10)
        replicas.submit([200 + i] * 20, ASK, lambda output: output[5] and done.release())
        assert done.acquire(timeout=10)
    owner = next(engine for engine in engines if engine.submitted[0][1][:160] == beginning)
    assert sum(prompt[:160] == beginning for _, prompt, _ in owner.submitted) == 6
    for engine in engines:
        engine.hold.set()
    for i in range(2):                                             # 28 each to compute there, and 188 elsewhere
        replicas.submit([*beginning, *[i] * 20], ASK, print)
    assert sum(prompt[:160] == beginning for _, prompt, _ in owner.submitted) == 8
    for i in range(12):
        replicas.submit([*beginning, *[i] * 20], ASK, print)
    assert sum(prompt[:160] == beginning for _, prompt, _ in owner.submitted) < 20


def test_what_is_over_counts_no_more(two):
    replicas, engines = two
    ends = []
    for i in range(20):
        number = replicas.submit([i + 1] * 30, {"max_tokens": 100, "n": 2}, ends.append)
        if i % 3 == 0:
            replicas.cancel(number)
    wait_until(lambda: sum(bool(output[5]) for output in ends) >= 26 and all(e.stats()["running"] == 0 for e in engines))
    assert [replica.to_do for replica in replicas._replicas] == [0, 0] and replicas._requests == {}


def test_refused_is_what_all_refuse(two):
    replicas, engines = two
    for engine in engines:
        engine.max_waiting = 2
        engine.hold.set()
    for i in range(4):
        replicas.submit([i + 1], ASK, print)
    assert taken(engines) == [2, 2]
    with pytest.raises(Overloaded):
        replicas.submit([9], ASK, print)
    assert replicas.stats()["refused"] == 1 and replicas.stats()["waiting"] == 4


def test_cancelling_reaches_the_right_engine(two):
    replicas, engines = two
    for engine in engines:
        engine.hold.set()
    numbers = [replicas.submit([i + 1], ASK, print) for i in range(4)]
    assert len(set(numbers)) == 4
    replicas.cancel(numbers[1])
    replicas.cancel(numbers[2])
    assert [engine.cancelled for engine in engines] == [[number for at, number in numbers[1:3] if at == own] for own in (0, 1)]


def test_one_that_fails_answers_with_an_error_and_gets_no_more(two):
    replicas, engines = two
    for engine in engines:
        engine.hold.set()
    outputs = []
    for i in range(4):
        replicas.submit([i + 1], ASK, outputs.append)
    engines[0].failure = RuntimeError("a rank is gone")
    wait_until(lambda: replicas.failures())
    wait_until(lambda: len(outputs) == 2)
    assert all(output[0][0] == 0 and output[5] == "error" and "a rank is gone" in output[6] for output in outputs)
    for i in range(6):
        replicas.submit([i + 1], ASK, outputs.append)
    assert taken(engines) == [2, 8] and replicas.failure is None and set(replicas.failures()) == {0}
    engines[1].failure = RuntimeError("the other too")
    wait_until(lambda: len(replicas.failures()) == 2)
    assert replicas.failure is not None
    with pytest.raises(EngineStopped, match="a rank is gone|the other too"):
        replicas.submit([1], ASK, print)


# ---- finalizers -----------------------------------------------------------------------------------------------------------------------
def test_an_llm_that_is_dropped_under_its_dispatchers_lock_ends():
    kept = []

    class Dropping(list):
        def __iter__(self):                                        # the dispatcher sorts them out under its lock
            kept.clear()
            gc.collect()
            return super().__iter__()

    class Engine(FakeEngine):
        def poll(self, timeout_s):
            return Dropping(super().poll(timeout_s))
    model = make_model()
    model.engines[0].__class__ = Engine
    kept.append(LLM.of(model))
    kept[0]._dispatcher.submit([5], {"max_tokens": 50, "n": 1}, print)
    wait_until(lambda: model.engines[0].closed, 5)


def test_a_finalizer_may_cancel_while_a_request_is_submitted():
    class Engine(FakeEngine):
        def submit(self, prompt, options):
            if self.submitted:
                dispatcher.cancel(1)                               # on this thread, under the lock
            return super().submit(prompt, options)
    engine = Engine()
    engine.hold.set()
    dispatcher = Dispatcher(engine)
    ended = threading.Thread(target=lambda: [dispatcher.submit([5], ASK, print) for _ in range(2)], daemon=True)
    ended.start()
    ended.join(timeout=5)
    assert not ended.is_alive() and engine.cancelled == [1]
    engine.hold.clear()
    dispatcher.close()


# ---- the server -----------------------------------------------------------------------------------------------------------------------
def samples(server):
    text = httpx.get(f"{server.url}/metrics").text
    return {(s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_the_server_is_degraded_while_one_replica_is_gone():
    with serving(replicas=2, context=4096, step_s=0.002) as server:
        engines = server.model.engines
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "model": "small"}
        for engine in engines:
            engine.hold.set()
        found = []

        def post(i):
            found.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": f"{i}", "max_tokens": 9}, timeout=20))
        asking = [threading.Thread(target=post, args=(i,)) for i in range(8)]
        for thread in asking:
            thread.start()
        wait_until(lambda: sum(taken(engines)) == 8)
        assert taken(engines) == [4, 4]
        engines[1].failure = RuntimeError("rank 1 is gone")
        engines[0].hold.clear()
        for thread in asking:
            thread.join(timeout=20)
        assert sorted(response.status_code for response in found) == [200] * 4 + [500] * 4
        assert all("rank 1 is gone" in response.text for response in found if response.status_code == 500)
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 200 and health.json() == {"status": "degraded", "model": "small", "replicas": 2,
                                                               "failed": {"1": "rank 1 is gone"}}
        assert [httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code for _ in range(6)] == [200] * 6
        seen = samples(server)
        assert [seen["unshard_replica_up", str(at)] for at in (0, 1)] == [1, 0]
        assert [seen["unshard_requests_finished_total", str(at)] for at in (0, 1)] == [10, 0]
        live = httpx.get(f"{server.url}/live").json()
        assert (live["replicas"], live["failed"], live["blocks"], live["finished"]) == (2, 1, 200, 10)
        engines[0].failure = RuntimeError("and rank 0")
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)


def test_a_client_that_leaves_frees_its_place_on_its_replica():
    with serving(replicas=2, context=100_000, step_s=0.005) as server:
        engines = server.model.engines
        with httpx.Client(base_url=server.url, timeout=20) as http:
            body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 50_000, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()                      # its end closes the connection
                next(lines)
                wait_until(lambda: [engine.stats()["running"] for engine in engines] == [2, 2])
        wait_until(lambda: [sorted(engine.cancelled) for engine in engines] == [[1, 2], [1, 2]] and server.service.is_idle)


def test_a_drain_waits_for_every_replica():
    import asyncio
    with serving(replicas=2, step_s=0.01) as server:
        found = []

        def post(i):
            found.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": f"{i}", "max_tokens": 40}, timeout=20).json())
        asking = [threading.Thread(target=post, args=(i,)) for i in range(4)]
        for thread in asking:
            thread.start()
        wait_until(lambda: [engine.stats()["running"] for engine in server.model.engines] == [2, 2])
        asyncio.run_coroutine_threadsafe(server.service.drain(20), server.service._loop).result(timeout=20)
        for thread in asking:
            thread.join(timeout=10)
        assert [answer["usage"]["completion_tokens"] for answer in found] == [40] * 4, json.dumps(found)[:500]


# ---- real engines ---------------------------------------------------------------------------------------------------------------------
def test_replicas_of_a_model_say_what_one_says(tmp_path):
    import small_tokenizers
    import unshard
    save_tiny("llama", tmp_path, vocab_size=512)
    small_tokenizers.write_folder(tmp_path)
    prompts = [[3 + (i * j) % 200 for j in range(1, 10 + i)] for i in range(16)]
    settings = {"dtype": "fp32", "kv_cache_tokens": 1024}
    with unshard.LLM(tmp_path, threads=1, **settings) as llm:
        solo = [llm.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True)[0].tokens for prompt in prompts]
    with unshard.LLM(tmp_path, replicas=2, **settings) as llm:
        both = llm.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True)
        assert [result.tokens for result in both] == solo
        assert min(engine.stats()["finished"] for engine in llm.model.engines) >= 4
    with pytest.raises(ValueError, match="replicas is 0"):
        unshard.LLM(tmp_path, replicas=0)
