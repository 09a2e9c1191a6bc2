"""`unshard.LLM`, `unshard generate` and `unshard serve`, on a fake engine; the server's page in a browser."""
import gc
import html
import json
import re
import shutil
import subprocess
import sys
import threading
import types
import weakref

import pytest
import small_tokenizers
import unshard
from fake_engine import FakeEngine
from serving_app import make_model, serving, wait_until
from unshard.inference import commands
from unshard.inference.dispatcher import EngineStopped
from unshard.inference.generation_config import sampling_defaults
from unshard.inference.llm import LLM
from unshard.inference.sampling import SamplingParams

FOX = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture
def llm():
    with LLM.of(make_model()) as opened:
        yield opened


def expected(llm, prompt, count, index=0):
    engine = llm.model.engine
    return [engine.token_at(prompt, index, place) for place in range(count)]


# ---- LLM ------------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompts", ["one", ["one", "two"], [5, 6, 7], [[5, 6], [7]], []])
def test_prompts_of_every_kind(llm, prompts):
    results = llm.generate(prompts, max_tokens=8)
    lists = [prompts] if isinstance(prompts, str) or prompts and isinstance(prompts[0], int) else prompts
    tokens = [llm.tokenizer.encode(p) if isinstance(p, str) else p for p in lists]
    assert [r.prompt_tokens for r in results] == tokens
    assert [r.tokens for r in results] == [expected(llm, t, 8) for t in tokens]
    assert [r.text for r in results] == [llm.tokenizer.decode(r.tokens) for r in results]
    assert all(r.finish_reason == "length" and r.logprobs == [] for r in results)


def test_several_sequences_and_logprobs(llm):
    result = llm.generate("x", SamplingParams(max_tokens=4, n=3, logprobs=2))[0]
    assert [s.tokens for s in result.sequences] == [expected(llm, result.prompt_tokens, 4, index) for index in range(3)]
    assert [entry.token for entry in result.logprobs] == result.tokens and all(len(entry.likeliest) == 2 for entry in result.logprobs)


def test_more_prompts_than_the_queue_holds():
    with LLM.of(make_model(max_waiting=3, max_sequences=2)) as llm:
        results = llm.generate([[5, i] for i in range(60)], max_tokens=20)
        assert [r.tokens for r in results] == [expected(llm, [5, i], 20) for i in range(60)]
        assert 0 < llm.stats()["refused"] <= 60                    # it is asked again when a request has ended, not at every token


def test_a_conversation():
    with LLM.of(make_model(answer=FOX, end_after=5)) as llm:
        messages = [{"role": "user", "content": "Why?"}]
        result = llm.chat(messages, max_tokens=None)[0]
        assert result.prompt_tokens == llm.tokenizer.chat(messages) and result.finish_reason == "stop"
        assert result.tokens[-1] == 2 and FOX.startswith(result.text)
        assert [r.text for r in llm.chat([messages, messages], max_tokens=3)] == [llm.tokenizer.decode(result.tokens[:3])] * 2


def test_a_stream_and_its_end():
    with LLM.of(make_model(answer=FOX, step_s=0.001, context=100_000)) as llm:
        pieces = list(llm.stream("x", max_tokens=20, stop="lazy"))
        assert "".join(piece.text for piece in pieces) == "The quick brown fox jumps over the " and pieces[-1].finish_reason == "stop"
        stream = llm.stream("x", max_tokens=50_000)
        next(stream)
        stream.close()
        wait_until(lambda: llm.stats()["running"] == 0)


def test_output_that_must_match(llm):
    results = llm.generate(["a", "b"], max_tokens=100, json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 2}, n=2)
    for sequence in (s for r in results for s in r.sequences):
        assert sequence.finish_reason == "length" or len(json.loads(sequence.text)) >= 2
    results = llm.generate([str(i) for i in range(5)], max_tokens=100, regex="(yes|no)")
    assert {r.text for r in results} <= {"yes", "no"} and all(r.finish_reason == "stop" for r in results)


@pytest.mark.parametrize("options, words", [
    ({"stop": ""}, "none of them empty"), ({"stop": ["a", ""]}, "none of them empty"), ({"n": 0}, "n 0: at least 1"),
    ({"regex": "(("}, "expression"),
    ({"json_schema": {"type": "x"}}, "schema can't be used"), ({"json_schema": {}, "regex": "a"}, "give one of them"),
    ({"logit_bias": {9999: 1}}, "logit_bias: token 9999")])
def test_wrong_options_are_named(llm, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        llm.generate("x", **options)
    with pytest.raises(ValueError, match="give one of them"):
        llm.generate("x", SamplingParams(), max_tokens=5)
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0


def test_a_wrong_prompt_cancels_the_others(llm):
    llm.model.engine.hold.set()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.generate([[5], [6], [99999]])
    assert llm.stats()["waiting"] == 0 and llm.model.engine.cancelled == [1, 2]
    llm.model.engine.hold.clear()
    with pytest.raises(ValueError, match="empty"):
        llm.generate([[]])


def test_threads_share_it(llm):
    found = {}

    def ask(i):
        found[i] = llm.generate([[7, i], [8, i]], max_tokens=10)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    for i in range(12):
        assert [r.tokens for r in found[i]] == [expected(llm, [7, i], 10), expected(llm, [8, i], 10)]


def test_an_engine_that_fails_or_is_closed_ends_what_waits(llm):
    llm.model.engine.hold.set()
    failed = {}

    def ask():
        try:
            llm.generate("x", n=2)
        except EngineStopped as error:
            failed["why"] = str(error)
    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: llm.stats()["waiting"] == 1)
    llm.model.engine.failure = RuntimeError("a worker died")
    thread.join(timeout=10)
    assert failed["why"] == "the engine failed: a worker died"
    with pytest.raises(EngineStopped, match="a worker died"):
        llm.generate("x")
    llm.close()
    llm.close()
    assert llm.model.engine.closed


def test_nobodys_llm_is_closed():
    llm = LLM.of(make_model())
    llm.generate("x")
    engine, kept = llm.model.engine, weakref.ref(llm)
    del llm
    gc.collect()
    assert kept() is None
    wait_until(lambda: engine.closed)              # a finalizer waits for nothing


def test_a_program_that_doesnt_close_it_ends():
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from serving_app import make_model
from unshard.inference.llm import LLM
llm = LLM.of(make_model())
print(len(llm.generate("x", max_tokens=4)[0].tokens))
stream = llm.stream("x", max_tokens=100)
next(stream)
"""
    folder = __file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


# ---- opening --------------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def fake_core(monkeypatch, tmp_path):
    """The binding is the fake, and models' folders hold a tokenizer only."""
    opened = []

    def engine(path, options):
        opened.append((path, options))
        return FakeEngine(vocab=434, end_token=2, answer=list(small_tokenizers.byte_level().encode(FOX).ids), end_after=6)
    monkeypatch.setattr(unshard, "_inference", types.SimpleNamespace(
        InferenceEngine=engine, InferenceEmbedder=types.SimpleNamespace(takes=lambda path: False)), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small_tokenizers.write_folder(tmp_path / "model")
    return opened


def test_a_folder_is_opened_with_its_options(fake_core, tmp_path):
    with unshard.LLM(tmp_path / "model", dtype="int8", threads=2, max_context=100) as llm:
        assert fake_core == [(str(tmp_path / "model"), {"dtype": "int8", "threads": 2, "max_context": 100})]
        assert llm.model.name == "model" and llm.model.context == 100 and unshard.SamplingParams is SamplingParams
    with unshard.LLM(tmp_path / "model", weight_memory="1.5G"):
        assert fake_core[-1][1] == {"weight_memory_bytes": 3 << 29, "weight_cache": str(tmp_path / "cache" / "unshard" / "weights")}
    with unshard.LLM(tmp_path / "model", weight_memory=1000, weight_cache="elsewhere"):
        assert fake_core[-1][1] == {"weight_memory_bytes": 1000, "weight_cache": "elsewhere"}
    with pytest.raises(ValueError, match="'much': an amount of memory is wanted, such as 2G"):
        unshard.LLM(tmp_path / "model", weight_memory="much")
    with pytest.raises(ValueError, match="kv_tokens: no such option"):
        unshard.LLM(tmp_path / "model", kv_tokens=5)
    with pytest.raises(FileNotFoundError, match="no such folder or file"):
        unshard.LLM(tmp_path / "absent")


def test_a_model_without_a_tokenizer_leaves_no_engine(fake_core, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    closed = []
    monkeypatch.setattr(FakeEngine, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="its tokenizer can't be read"):
        LLM(tmp_path / "empty")
    assert len(closed) == 1


# ---- generation_config.json -----------------------------------------------------------------------------------------------------------
def test_the_makers_sampling(tmp_path):
    file = tmp_path / "generation_config.json"
    assert sampling_defaults(tmp_path) == {} == sampling_defaults(tmp_path / "some.gguf")
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 2, "min_p": None}))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    for wrong in ({"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 2.5}, {"min_p": 1},
                  {"repetition_penalty": 1e-300}, {"temperature": True}, {"temperature": float("nan")}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=f"generation_config.json: {next(iter(wrong))} is .*--generation-config none"):
            sampling_defaults(tmp_path)
    for text in ("[", "[]", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ValueError, match="generation_config.json: isn't"):
            sampling_defaults(tmp_path)


# ---- commands -------------------------------------------------------------------------------------------------------------------------
def test_generate_streams_to_the_terminal(fake_core, tmp_path, capsys):
    assert commands.generate([str(tmp_path / "model"), "Why?", "--max-tokens", "4", "--dtype", "bf16", "--no-share-prefixes"]) == 0
    out, errors = capsys.readouterr()
    assert FOX.startswith(out.removesuffix("\n")) and out.endswith("\n")
    assert re.fullmatch(r"\[\d+ prompt tokens; first text after [\d.]+ s, then [\d.]+ tokens/s; 4 tokens\]\n", errors)
    assert fake_core[0][1] == {"dtype": "bf16", "share_prefixes": False}


def test_generate_answers_questions(fake_core, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(read=lambda: "Why?"))
    assert commands.generate([str(tmp_path / "model"), "-", "--chat", "--system", "Be brief.", "--stop", "quick"]) == 0
    assert capsys.readouterr().out == "The \n"


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_what_cant_be_opened_is_one_line(command, tmp_path, capsys):
    assert getattr(commands, command)([str(tmp_path / "absent")] + ["x"] * (command == "generate")) == 1
    assert re.fullmatch(r"unshard: \S+/absent: no such folder or file; .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["--port", "70000"], ["--drain-timeout", "-1"], ["--drain-timeout", "nan"], ["--threads", "0"],
                                       ["--dtype", "fp8"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        commands.serve(["model", *arguments])
    assert caught.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_serve_needs_its_packages(monkeypatch, capsys, tmp_path):
    for name in [name for name in sys.modules if name.startswith("unshard.inference.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert commands.serve([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install fastapi uvicorn prometheus_client" in said


def test_a_port_that_is_taken_is_one_line(fake_core, tmp_path, capsys):
    with serving() as server:
        assert commands.serve([str(tmp_path / "model"), "--port", str(server.port)]) == 1
    assert re.fullmatch(r"unshard: can't listen on 127.0.0.1, port \d+: Address already in use\n", capsys.readouterr().err)


def test_help_of_both():
    for command, words in (("serve", "--served-model-name"), ("generate", "--temperature")):
        done = subprocess.run([sys.executable, "-m", "unshard.cli", command, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and words in done.stdout and "--kv-cache-tokens" in done.stdout
    done = subprocess.run([sys.executable, "-m", "unshard.cli", "--help"], capture_output=True, text=True, timeout=60)
    assert "serve" in done.stdout and "generate" in done.stdout


# ---- the page -------------------------------------------------------------------------------------------------------------------------
_PROBE = """<pre id="probe"></pre><script>
(async () => {
  const part = id => document.getElementById(id), wait = ms => new Promise(done => setTimeout(done, ms)), seen = {};
  const sent = async () => { part("form").requestSubmit(); do await wait(20); while (part("send").disabled); };
  const text = () => part("output").textContent;
  await sent();
  seen.chat = text();
  seen.speed = part("speed").textContent;
  part("kind").value = "text";
  part("most").value = 3;
  await sent();
  seen.text = text();
  part("prompt").value = "";
  await sent();
  seen.error = text();
  seen.failed = part("output").className;
  await wait(2500);
  seen.state = part("state").textContent;
  seen.blocks = part("blocks").textContent;
  seen.latency = part("latency").textContent;
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const pixels = canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  seen.drawn = [...document.querySelectorAll("canvas")].map(canvas => pixels(canvas).some(value => value));
  part("probe").textContent = JSON.stringify(seen);
})();
</script>"""


@pytest.fixture(scope="module")
def browser():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return found or pytest.skip("no chromium on this machine (apt-get install chromium): the page isn't looked at")


@pytest.mark.parametrize("width", [1280, 600])
def test_the_page_in_a_browser(browser, tmp_path, monkeypatch, width):
    from unshard.inference.server import page
    whole = page.page
    monkeypatch.setattr(page, "page", lambda name: whole(name).replace("</body>", _PROBE + "</body>"))
    with serving(answer=FOX, context=2000) as server:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", f"--window-size={width},900",
                   "--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom", server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line and "400 (Bad Request)" not in line]
    assert done.returncode == 0 and complaints == []
    seen = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)[1]))
    assert seen["chat"].startswith(FOX) and FOX.startswith(seen["text"]) and 0 < len(seen["text"]) < 20
    assert re.match(r"200 tokens for a prompt of \d+; first one after ", seen["speed"])
    assert seen["error"].startswith("prompt: it has no tokens") and seen["failed"] == "failed"
    assert seen["state"] == "serving" and seen["blocks"] == "0 of 100 blocks of 16" and "Between tokens" in seen["latency"]
    assert seen["overflow"] == 0 and seen["drawn"] == [True] * 3


@pytest.mark.parametrize("made", ["page", "embeddings_page"])
def test_the_page_asks_nobody_else(made):
    from unshard.inference.server import page
    text = getattr(page, made)("a<b>")
    assert "a&lt;b&gt;" in text and "@@" not in text
    assert not re.search(r"\b(?:https?:)?//[\w.-]+\.\w+/|@import|url\(|import\(|innerHTML", text)
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,"]
