"""Several engines of one model, told apart only by what each has to do: a request goes to the one that will be done with it first."""
import collections
import itertools
import threading

from unshard.inference.dispatcher import Dispatcher, EngineStopped

_BLOCK = 16                     # tokens of a block of the KV cache: only whole ones are shared
_MOST_BLOCKS = 256              # of a prompt, that are looked at
_ANSWER = 256                   # tokens that an answer has, where it may have more: most end by themselves


class Replicas:
    """Like a Dispatcher of one engine, over all of them. Numbers of requests are (replica, number).

    A replica whose engine fails answers its requests with an error and gets no more; the others serve on."""

    def __init__(self, engines, deliver=None):
        self._replicas = [_Replica(engine, deliver) for engine in engines]
        self._requests = {}                  # number -> _Request
        self._refused = 0

    def submit(self, prompt, options, sink):
        """The request's number, with which outputs begin. Raises what InferenceEngine.submit raises (Overloaded: every replica is full),
        and EngineStopped where none is left."""
        refusal = None
        for at, blocks in self._in_order(prompt):
            try:
                return self._submit(at, blocks, prompt, options, sink)
            except EngineStopped as error:
                refusal = refusal or error
            except RuntimeError as error:
                if not hasattr(error, "retry_after_s"):
                    raise
                if not hasattr(refusal, "retry_after_s") or error.retry_after_s < refusal.retry_after_s:
                    refusal = error
        self._refused += hasattr(refusal, "retry_after_s")
        raise refusal

    def cancel(self, number):
        if (request := self._requests.pop(number, None)) is not None:
            request.end()
        self._replicas[number[0]].dispatcher.cancel(number[1])

    @property
    def failure(self):
        """What ended the last replica that was left, or None."""
        failures = self.failures()
        return failures[max(failures)] if len(failures) == len(self._replicas) else None

    def failures(self):
        """{replica: what ended it}"""
        return {at: replica.dispatcher.failure for at, replica in enumerate(self._replicas) if replica.dispatcher.failure is not None}

    def __len__(self):
        return len(self._replicas)

    def stats(self):
        """Of all engines together, as InferenceEngine.stats."""
        each = [replica.dispatcher.engine.stats() for replica in self._replicas]
        if len(each) == 1:
            return each[0]
        # A request that one full replica refuses goes to the next: refused are only those that nobody took.
        sums = {key: sum(stats[key] for stats in each) for key in each[0]}
        return {**sums, "block_tokens": each[0]["block_tokens"], "refused": self._refused}

    def logits(self, tokens):
        """As InferenceEngine.logits, by the replica that has least to do."""
        at, _ = self._in_order(tokens)[0]
        return self._replicas[at].dispatcher.engine.logits(tokens)

    def stop(self):
        for replica in self._replicas:
            replica.dispatcher.stop()

    def close(self):
        self.stop()                          # all at once, then wait for each
        for replica in self._replicas:
            replica.dispatcher.close()

    def _in_order(self, prompt):
        """(replica, the prompt's blocks) of those that serve: first the one with the fewest tokens to compute, this prompt's included."""
        blocks = _blocks(prompt) if len(self._replicas) > 1 else ()
        costs = [(replica.to_do - replica.known_tokens(blocks), replica.taken, at) for at, replica in enumerate(self._replicas)]
        serving = [cost for cost in sorted(costs) if self._replicas[cost[2]].dispatcher.failure is None]
        return [(at, blocks) for _, _, at in serving or costs]      # where none serves, they say why

    def _submit(self, at, blocks, prompt, options, sink):
        replica = self._replicas[at]
        most = options.get("max_tokens", _ANSWER)
        request = _Request(replica, len(prompt) - replica.known_tokens(blocks), options.get("n", 1), _ANSWER if most < 0 else most)

        def renumbered(output):
            if request.saw(output):
                self._requests.pop((at, output[0]), None)
            sink(((at, output[0]), *output[1:]))
        try:
            number = at, replica.dispatcher.submit(prompt, options, renumbered)
        except BaseException:
            request.end()
            raise
        replica.remember(blocks)
        self._requests[number] = request
        if not request.running:              # it ended while its number was on the way here
            self._requests.pop(number, None)
        return number


class _Replica:
    def __init__(self, engine, deliver):
        self.dispatcher = Dispatcher(engine, deliver)
        self.lock = threading.RLock()        # as a Dispatcher's: finalizers may come in between
        self.to_do = 0                       # tokens to compute for requests that run or wait, nearly
        self.taken = 0
        self._blocks, self._most = collections.OrderedDict(), max(1, engine.stats()["blocks"])

    def known_tokens(self, blocks):
        """Of the prompt with these blocks: those that its KV cache probably holds."""
        return _BLOCK * sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks))

    def remember(self, blocks):
        with self.lock:
            self.taken += 1
            for block in blocks:
                self._blocks[block] = None
                self._blocks.move_to_end(block)
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)


class _Request:
    """What one request still adds to its replica's work."""

    def __init__(self, replica, prompt, sequences, answer):
        self._replica, self._prompt, self._left = replica, max(prompt, 0), sequences * min(answer, _ANSWER)
        self.running = sequences
        with replica.lock:
            replica.to_do += self._prompt + self._left

    def saw(self, output):
        """Is it over with this output?"""
        with self._replica.lock:
            one = 1 if self._left > 0 else 0
            self._replica.to_do -= self._prompt + one            # the first token says that the prompt is computed
            self._prompt, self._left = 0, self._left - one
            self.running -= bool(output[5])
            if self.running <= 0:
                self.end()
            return self.running <= 0

    def end(self):
        with self._replica.lock:
            self._replica.to_do -= self._prompt + self._left
            self._prompt = self._left = self.running = 0


def _blocks(prompt):
    """A number for each whole block of the prompt, which stands for it and all before it."""
    numbers, before = [], 0
    for first in range(0, min(len(prompt) - _BLOCK + 1, _MOST_BLOCKS * _BLOCK), _BLOCK):
        before = hash((before, tuple(prompt[first:first + _BLOCK])))
        numbers.append(before)
    return numbers
