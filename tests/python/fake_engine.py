"""What `unshard._inference.InferenceEngine` looks like to Python, with tokens made of nothing but the prompt: to test what is above it."""
import hashlib
import queue
import struct
import threading
import time


class Overloaded(RuntimeError):
    def __init__(self, text, retry_after_s):
        super().__init__(text)
        self.retry_after_s = retry_after_s


class FakeEngine:
    """Says `answer` (tokens) over and over if given, else tokens chosen by a hash of prompt, sequence and place. One token of every running
    sequence each step_s; `hold` stops it. end_after: that many tokens of a sequence, then the end token."""

    def __init__(self, vocab=512, context=256, end_token=0, answer=None, step_s=0.0, max_waiting=64, max_sequences=16, end_after=None,
                 choices=None):
        self.vocab, self.context, self.end_token, self.answer, self.step_s = vocab, context, end_token, answer, step_s
        self.max_waiting, self.max_sequences, self.end_after = max_waiting, max_sequences, end_after
        self.choices = list(choices or range(1, vocab))        # tokens that the hash chooses among
        self.hold = threading.Event()
        self.failure = None
        self.closed = False
        self.submitted, self.cancelled = [], []
        self._lock, self._outputs, self._waiting, self._running, self._next = threading.Lock(), queue.SimpleQueue(), [], {}, 1
        self._counts = dict.fromkeys(("steps", "prompt_tokens", "generated_tokens", "shared_tokens", "preemptions", "finished", "cancelled",
                                      "refused", "guessed", "accepted", "weight_bytes_read", "weight_wait_s"), 0)
        self._work = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # ---- the surface
    def model(self):
        return {"family": "fake", "dtype": "fp32", "kv_dtype": "fp32", "vocab": self.vocab, "layers": 1, "context": self.context,
                "parameters": 1_000_000, "weight_bytes": 4_000_000, "kv_bytes": 1_000_000, "end_tokens": [self.end_token]}

    def submit(self, prompt, options):
        known = {"max_tokens", "min_tokens", "n", "stop_tokens", "ignore_eos", "priority", "temperature", "top_p", "top_k", "min_p",
                 "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "logprobs", "filters"}
        assert set(options) <= known, set(options) - known
        if not prompt:
            raise ValueError("prompt: it is empty")
        if wrong := [token for token in prompt if not 0 <= token < self.vocab]:
            raise ValueError(f"prompt: token {wrong[0]} is outside the vocabulary of {self.vocab}")
        if wrong := [token for token in options.get("logit_bias", {}) if token >= self.vocab]:
            raise ValueError(f"logit_bias: token {wrong[0]} is outside the vocabulary of {self.vocab}")
        if len(prompt) >= self.context:
            raise ValueError(f"prompt: {len(prompt)} tokens; the context is {self.context}")
        assert len(options.get("filters", [])) in (0, options.get("n", 1))
        with self._lock:
            if len(self._waiting) >= self.max_waiting:
                self._counts["refused"] += 1
                raise Overloaded(f"{len(self._waiting)} requests wait already", 1.5)
            number, self._next = self._next, self._next + 1
            self._waiting.append((number, list(prompt), dict(options)))
            self.submitted.append((number, list(prompt), dict(options)))
            self._counts["prompt_tokens"] += len(prompt)
        self._work.set()
        return number

    def cancel(self, number):
        with self._lock:
            self.cancelled.append(number)
            self._waiting = [request for request in self._waiting if request[0] != number]
            for key in [key for key in self._running if key[0] == number]:
                del self._running[key]
                self._outputs.put((*key, -1, 0.0, [], "cancelled", ""))
            self._counts["cancelled"] += 1

    def poll(self, timeout_s):
        if self.failure:
            raise self.failure
        outputs = []
        try:
            outputs.append(self._outputs.get(timeout=timeout_s))
            while True:
                outputs.append(self._outputs.get_nowait())
        except queue.Empty:
            return outputs

    def logits(self, tokens):
        """Of the token after each one."""
        return b"".join(struct.pack(f"<{self.vocab}f", *(-((token + 3 * i) % 17) for i in range(self.vocab))) for token in tokens)

    def stats(self):
        with self._lock:
            return {"waiting": len(self._waiting), "running": len(self._running), "blocks": 100, "block_tokens": 16,
                    "blocks_used": min(100, 7 * len(self._running)), "busy_s": 0.5, **self._counts}

    def close(self):
        self.closed = True
        self._work.set()
        self._thread.join()

    # ---- what it does
    def token_at(self, prompt, index, place):
        if self.answer is not None:
            return self.answer[place % len(self.answer)]
        digest = hashlib.sha256(repr((prompt, index, place)).encode()).digest()
        return self.choices[int.from_bytes(digest[:8], "little") % len(self.choices)]

    def _run(self):
        while not self.closed:
            self._work.wait()
            if self.hold.is_set():
                time.sleep(0.002)
                continue
            with self._lock:
                while self._waiting and len(self._running) < self.max_sequences:
                    number, prompt, options = self._waiting.pop(0)
                    for index in range(options.get("n", 1)):
                        self._running[number, index] = (prompt, options, [])
                if not self._running:
                    self._work.clear()
                for key, (prompt, options, made) in list(self._running.items()):
                    self._step(key, prompt, options, made)
                self._counts["steps"] += 1
            time.sleep(self.step_s)

    def _step(self, key, prompt, options, made):
        token = self.token_at(prompt, key[1], len(made))
        if self.end_after is not None and len(made) >= self.end_after and not options.get("ignore_eos"):
            token = self.end_token
        filters = options.get("filters")
        if filters:
            mask = filters[key[1]](list(made))
            assert len(mask) == -(-self.vocab // 32) * 4
            allowed = [t for t in range(self.vocab) if mask[t // 8] >> t % 8 & 1]
            assert allowed
            if token not in allowed:
                token = self.end_token if self.end_token in allowed else allowed[token % len(allowed)]
        made.append(token)
        self._counts["generated_tokens"] += 1
        ends = {*options.get("stop_tokens", []), *([] if options.get("ignore_eos") else [self.end_token])}
        most = options["max_tokens"] if options["max_tokens"] >= 0 else self.context
        finish = "stop" if token in ends else "length" if len(made) >= most or len(prompt) + len(made) >= self.context else ""
        wanted = options.get("logprobs", -1)
        likeliest = [((token + i) % self.vocab, -0.5 - i) for i in range(max(wanted, 0))]
        self._outputs.put((*key, token, -0.5 if wanted >= 0 else 0.0, likeliest, finish, ""))
        if finish:
            del self._running[key]
            self._counts["finished"] += not any(other[0] == key[0] for other in self._running)
