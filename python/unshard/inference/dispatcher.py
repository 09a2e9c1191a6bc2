"""One thread takes the engine's outputs and gives each to the request that it belongs to."""
import atexit
import threading

_POLL_S = 0.1


class EngineStopped(RuntimeError):
    """The engine was closed, or failed."""


class Dispatcher:
    """deliver: called with [(sink, output)] on the dispatcher's thread, once for each batch of outputs; None: each sink is called there.
    A server passes a function that moves the batch to its event loop. An output is what InferenceEngine.poll gives:
    (request, index, token, logprob, likeliest, finish, error).

    Its thread ends the engine, too: before the interpreter ends if nobody closes it."""

    def __init__(self, engine, deliver=None):
        self.engine = engine
        self.failure = None
        self._deliver = deliver or _call
        self._requests = {}                  # number -> [sink, its sequences, those that still run]
        # Held while submitting: an output may come before the request's number is known here. A finalizer may run in the middle of that, on
        # this very thread, and cancel another request or stop() this: hence an RLock, and nothing below minds that others come in between.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unshard-outputs", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, prompt, options, sink):
        """The request's number; `sink(output)` for each output. Raises what InferenceEngine.submit raises, and EngineStopped."""
        with self._lock:
            self._require_running()
            number = self.engine.submit(prompt, options)
            self._requests[number] = [sink, options.get("n", 1), options.get("n", 1)]
            return number

    def cancel(self, number):
        """No output of it comes after this (but for what is on its way to another thread already)."""
        with self._lock:
            known = self._requests.pop(number, None)
            if known and self.failure is None and not self._closing.is_set():
                self.engine.cancel(number)

    def stop(self):
        """The end begins: of this thread, then of the engine. What still runs gets an output that says so. Waits for nothing, so that a
        finalizer may call it, wherever it runs."""
        self._closing.set()

    def close(self):
        """stop(), and wait until all is done. May be called twice."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _require_running(self):
        if self._closing.is_set():
            raise EngineStopped("the engine was closed")
        if self.failure is not None:
            raise EngineStopped(f"the engine failed: {self.failure}")

    def _run(self):
        try:
            self._poll()
        finally:
            self._closing.wait()
            self.engine.close()
            self._end_all("the engine was closed")
            atexit.unregister(self.close)

    def _poll(self):
        while not self._closing.is_set():
            try:
                outputs = self.engine.poll(_POLL_S)
            except Exception as error:       # what ended the engine's thread: every request ends with it, and later ones are refused
                self.failure = error
                self._end_all(f"the engine failed: {error}")
                return
            if outputs:
                self._deliver(self._sorted_out(outputs))

    def _sorted_out(self, outputs):
        batch = []
        with self._lock:
            for output in outputs:
                request = self._requests.get(output[0])
                if request is None:
                    continue                 # cancelled
                batch.append((request[0], output))
                if output[5]:
                    request[2] -= 1
                    if request[2] == 0:
                        self._requests.pop(output[0], None)
        return batch

    def _end_all(self, why):
        with self._lock:
            ended, self._requests = self._requests, {}
        self._deliver([(sink, (number, index, -1, 0.0, [], "error", why))
                       for number, (sink, n, _) in ended.items() for index in range(n)])


def _call(batch):
    for sink, output in batch:
        sink(output)
