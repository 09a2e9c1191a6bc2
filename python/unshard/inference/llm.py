"""`unshard.LLM`: text from a model, in Python.

    with unshard.LLM("path/of/model") as llm:
        for result in llm.generate(["Once upon a time", "The capital of France is"], max_tokens=32, temperature=0):
            print(result.text)
"""
import collections
import dataclasses
import queue
import time
import weakref

from unshard.inference.dispatcher import EngineStopped
from unshard.inference.model import open_model
from unshard.inference.replicas import Replicas
from unshard.inference.sampling import SamplingParams
from unshard.inference.text_output import Sequence


@dataclasses.dataclass
class Result:
    """What came of one prompt: `sequences` holds n, and the names beside it are those of the first."""
    prompt_tokens: list
    sequences: list                  # of Sequence: text, tokens, finish_reason, logprobs

    text = property(lambda self: self.sequences[0].text)
    tokens = property(lambda self: self.sequences[0].tokens)                    # an end token included
    finish_reason = property(lambda self: self.sequences[0].finish_reason)      # "stop", "length"
    logprobs = property(lambda self: self.sequences[0].logprobs)                # of TokenLogprob; empty where not asked for


class LLM:
    """model: a Hugging Face folder or a GGUF file. options: device, dtype, kv_dtype, threads, kv_cache_tokens, step_tokens,
    max_sequences, max_waiting, max_context, share_prefixes, speculate, guesses, always_guess (unshard/inference/engine.h says what they
    mean); weight_memory ("2G", or bytes: weights beyond it are read from disk in each step) and weight_cache (the folder of the files
    that they are read from); tensor_parallel (ranks that compute it together), replicas (how many times it is held, each with threads
    and a cache of its own).

    Any thread may use it; requests of all of them are computed together. Raises ModelError (a RuntimeError), ValueError, OSError."""

    def __init__(self, model, **options):
        self._start(open_model(model, **options))

    @classmethod
    def of(cls, model):
        """On a unshard.inference.model.Model that is open already."""
        self = cls.__new__(cls)
        self._start(model)
        return self

    def _start(self, model):
        self.model = model
        self.tokenizer = model.tokenizer
        self._dispatcher = Replicas(model.engines)
        # The engine's threads end when nobody has this object any more. (Before the interpreter ends the dispatcher sees to it.)
        self._finalizer = weakref.finalize(self, self._dispatcher.stop)
        self._finalizer.atexit = False

    def generate(self, prompts, sampling=None, **options):
        """A list of Result, one for each prompt, in order.

        prompts: a text, a list of texts, a list of tokens, or a list of lists of tokens. sampling: SamplingParams; or its fields as
        options. Raises ValueError (a prompt too long, a wrong option), EngineStopped."""
        return self._run([self._encoded(prompt) for prompt in _prompts(prompts)], _sampling(sampling, options))

    def chat(self, messages, sampling=None, **options):
        """Like generate, for a conversation [{"role": "user", "content": "..."}, ...], or a list of them."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        return self._run([self.tokenizer.chat(conversation) for conversation in conversations], _sampling(sampling, options))

    def stream(self, prompt, sampling=None, **options):
        """Pieces (text, finish_reason) of one prompt (a text or tokens) as they come. Stopping the iteration cancels the request."""
        sampling = _sampling(sampling, options)
        if sampling.n != 1:
            raise ValueError(f"n {sampling.n}: a stream is of one sequence")
        run = _Run(self, [self._encoded(prompt)], sampling)
        try:
            for _, _, piece in run.pieces():
                yield piece
        finally:
            run.cancel()

    def stats(self):
        return self._dispatcher.stats()

    def close(self):
        """Cancels what runs, and frees the model. May be called twice."""
        self._dispatcher.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _encoded(self, prompt):
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(self, prompts, sampling):
        run = _Run(self, prompts, sampling)
        try:
            for _ in run.pieces():
                pass
        finally:
            run.cancel()
        return run.results


class _Run:
    """Prompts of one call. As many as the engine's queue takes are submitted; the others follow as these end."""

    def __init__(self, llm, prompts, sampling):
        self._model, self._dispatcher, self._sampling = llm.model, llm._dispatcher, sampling
        keep = sampling.logprobs is not None
        self.results = [Result(prompt, [Sequence(llm.tokenizer, sampling.stop, sampling.skip_special_tokens, keep)
                                        for _ in range(sampling.n)]) for prompt in prompts]
        self._unsent = collections.deque(range(len(prompts)))
        self._outputs = queue.SimpleQueue()
        self._grammar, self._full = self._model.grammar(sampling), False
        self._running = {}                   # the engine's number -> the prompt's

    def pieces(self):
        """(prompt, sequence, Piece)..."""
        while self._unsent or self._running:
            self._submit()
            number, index, *output = self._outputs.get()
            if number not in self._running:
                continue
            at = self._running[number]
            sequences = self.results[at].sequences
            piece = sequences[index].take(*output)
            if sequences[index].finish_reason == "error":
                raise EngineStopped(sequences[index].error)
            if all(sequence.finish_reason for sequence in sequences):
                del self._running[number]
                self._full = False
                self._dispatcher.cancel(number)          # a stop string was found: the engine doesn't know
            if piece:
                yield at, index, piece

    def _submit(self):
        while self._unsent and not self._full:
            at = self._unsent[0]
            options = self._model.request_options(self._sampling, self._grammar)
            try:
                number = self._dispatcher.submit(self.results[at].prompt_tokens, options, self._outputs.put)
            except RuntimeError as error:
                if not hasattr(error, "retry_after_s"):                    # else Overloaded: when one of ours has ended, or by and by
                    raise
                if self._running:
                    self._full = True
                    return
                time.sleep(min(error.retry_after_s, 1))
                continue
            self._running[number] = self._unsent.popleft()

    def cancel(self):
        for number in self._running:
            self._dispatcher.cancel(number)
        self._running.clear()


def _prompts(prompts):
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _sampling(sampling, options):
    if sampling is not None and options:
        raise ValueError(f"sampling and {', '.join(options)}: give one of them")
    return sampling or SamplingParams(**options)
