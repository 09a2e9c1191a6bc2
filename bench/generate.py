"""One way to generate text, timed: generate.py MODE MODEL(GGUF); one process, prints one JSON line.

MODE: unshard_bf16, unshard_w8a8, unshard_gguf (the file's own Q4_1), unshard_bf16_half (memory for half of the weights, the others are
read from disk in each step), transformers_bf16, injected_bf16 (transformers' module after deepspeed.init_inference), llama_cpp.
Reported: tokens a second of decoding at batch 1, 8 and 32 (from the second token on), tokens a second of a prefill of 1,024 tokens, the
tokens of one greedy answer, and for our modes the bytes of weights, all of which each token reads; of unshard_bf16_half also GB/s read,
the share of the steps that waits for the disk, and what dd reads of the file.
"""
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

THREADS = 2
PREFILL, DECODE = 1024, 48
PROMPT = "The history of computing began long before electronic machines, when people"


def prompt_tokens(model):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(os.path.dirname(model), gguf_file=os.path.basename(model))
    text = open(json.__file__, encoding="utf-8").read()
    return tokenizer(PROMPT)["input_ids"], tokenizer(text * 4)["input_ids"][:PREFILL]


class Unshard:
    def __init__(self, model, dtype, **options):
        from unshard import _core
        start = time.perf_counter()
        self.engine = _core.InferenceEngine(model, {"dtype": dtype, "threads": THREADS, "kv_dtype": "bf16", "share_prefixes": False,
                                                    "step_tokens": 512, "kv_cache_tokens": 16384, **options})
        self.load_s = time.perf_counter() - start
        self.weight_bytes = self.engine.model()["weight_bytes"]

    def generate(self, prompts, new):
        """(seconds to the last first token, seconds in all, the first prompt's tokens)"""
        options = {"max_tokens": new, "temperature": 0.0, "ignore_eos": True}
        start = time.perf_counter()
        requests = [self.engine.submit(prompt, options) for prompt in prompts]
        firsts, ends, tokens, decoding = {}, set(), [], None
        while len(ends) < len(requests):
            outputs = self.engine.poll(60)
            now = time.perf_counter() - start
            for request, _, token, _, _, finish, _ in outputs:
                firsts.setdefault(request, now)
                if request == requests[0]:
                    tokens.append(token)
                if finish:
                    ends.add(request)
            if decoding is None and len(firsts) == len(requests):
                decoding = self.engine.stats()
        self.from_disk = disk_use(decoding, self.engine.stats(), time.perf_counter() - start - max(firsts.values()))
        return max(firsts.values()), time.perf_counter() - start, tokens


def disk_use(before, after, seconds):
    """(GB/s of weights read, share of the steps' time that waited for them)"""
    waited, busy = after["weight_wait_s"] - before["weight_wait_s"], after["busy_s"] - before["busy_s"]
    return (after["weight_bytes_read"] - before["weight_bytes_read"]) / 1e9 / seconds, waited / busy if busy else 0.0


class Half(Unshard):
    """bf16, half of the weights' bytes in memory."""

    def __init__(self, model):
        whole = Unshard(model, "bf16")
        whole.engine.close()
        self.folder = tempfile.TemporaryDirectory(dir=pathlib.Path.home())        # a disk; the usual folder may be in memory
        half = {"weight_memory_bytes": whole.weight_bytes // 2, "weight_cache": self.folder.name}
        Unshard(model, "bf16", **half).engine.close()                             # packs; what is timed finds the file
        super().__init__(model, "bf16", **half)

    def dd_gbps(self):
        """What one reader gets of the same file past the page cache: the best of five."""
        file = next(pathlib.Path(self.folder.name).glob("*.weights"))
        rates = []
        for _ in range(5):
            said = subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=4M", "iflag=direct"], capture_output=True, text=True, check=True,
                                  env={**os.environ, "LC_ALL": "C"}).stderr
            rates.append(file.stat().st_size / float(re.search(r"copied, ([\d.e-]+) s", said)[1]) / 1e9)
        return max(rates)


class Transformers:
    def __init__(self, model):
        import torch
        from transformers import AutoModelForCausalLM
        torch.set_num_threads(THREADS)
        start = time.perf_counter()
        folder, name = os.path.split(model)
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16).eval()
        self.load_s, self.weight_bytes = time.perf_counter() - start, 0

    def generate(self, prompts, new):
        import torch
        ids = torch.tensor(prompts)
        first = []

        class Mark:
            def put(self, _):
                first.append(time.perf_counter())

            def end(self):
                pass

        start = time.perf_counter()
        with torch.inference_mode():
            streamer = Mark() if len(prompts) == 1 else None
            out = self.model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, streamer=streamer)
            end = time.perf_counter()
            if streamer is None:
                begin = time.perf_counter()
                self.model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
                first = [0, start + time.perf_counter() - begin]
        return first[1] - start, end - start, out[0, len(prompts[0]):].tolist()


class Injected(Transformers):
    """deepspeed.init_inference of the same module."""

    def __init__(self, model):
        import deepspeed
        super().__init__(model)
        start = time.perf_counter()
        self.model = deepspeed.init_inference(self.model, dtype=self.model.dtype, replace_with_kernel_inject=True)
        self.load_s += time.perf_counter() - start

    def generate(self, prompts, new):
        import torch
        ids, seconds = torch.tensor(prompts), {}
        for tokens in dict.fromkeys((1, new)):
            start = time.perf_counter()
            out = self.model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
            seconds[tokens] = time.perf_counter() - start
        return seconds[1], seconds[new], out[0, len(prompts[0]):].tolist()


class LlamaCpp:
    def __init__(self, model):
        from llama_cpp import Llama
        start = time.perf_counter()
        self.model = Llama(model, n_threads=THREADS, n_threads_batch=THREADS, n_ctx=2048, n_batch=512, verbose=False)
        self.load_s, self.weight_bytes = time.perf_counter() - start, 0

    def generate(self, prompts, new):
        if len(prompts) > 1:
            return None
        self.model.reset()
        self.model._ctx.kv_cache_clear() if hasattr(self.model._ctx, "kv_cache_clear") else None
        start, first, tokens = time.perf_counter(), None, []
        for token in self.model.generate(prompts[0], temp=0.0, top_k=1, reset=False):
            first = first or time.perf_counter()
            tokens.append(token)
            if len(tokens) == new:
                break
        return first - start, time.perf_counter() - start, tokens


def main():
    mode, path = sys.argv[1], sys.argv[2]
    short, long = prompt_tokens(path)
    if mode == "unshard_bf16_half":
        engine = Half(path)
    elif mode.startswith("unshard"):
        engine = Unshard(path, {"unshard_bf16": "bf16", "unshard_w8a8": "w8a8", "unshard_gguf": "auto"}[mode])
    else:
        engine = {"transformers_bf16": Transformers, "injected_bf16": Injected, "llama_cpp": LlamaCpp}[mode](path)
    result = {"load_s": engine.load_s, "weight_bytes": engine.weight_bytes, "decode": {}}
    engine.generate([short], 8)
    for batch in (1, 8, 32):
        prompts = [short[:len(short) - 1] + [short[-1] + i] for i in range(batch)]
        rates, disk = [], []
        for _ in range(3):
            measured = engine.generate(prompts, DECODE)
            if measured is None:
                break
            first, end, tokens = measured
            rates.append(batch * (DECODE - 1) / (end - first))
            disk.append(getattr(engine, "from_disk", (0.0, 0.0)))
            if batch == 1:
                result["answer"] = tokens
        if rates:
            result["decode"][batch] = statistics.median(rates)
        if mode == "unshard_bf16_half":
            result.setdefault("from_disk", {})[batch] = [statistics.median(column) for column in zip(*disk)]
    prefills = []
    for i in range(3):
        first, *_ = engine.generate([[long[i]] + long[1:]], 1 if mode != "transformers_bf16" else 2)
        prefills.append(PREFILL / first)
    result["prefill"] = statistics.median(prefills)
    if mode == "unshard_bf16_half":
        result["dd_gbps"] = engine.dd_gbps()
        engine.engine.close()
        engine.folder.cleanup()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
