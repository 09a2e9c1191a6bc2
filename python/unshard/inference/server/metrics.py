"""/metrics for Prometheus, and the same figures as JSON for the page."""
import collections
import time

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_GAUGES = {"waiting": ("requests_waiting", "Sequences in the queue; a request has n of them"),
           "running": ("requests_running", "Sequences being computed"),
           "blocks": ("kv_blocks", "Blocks of the KV cache"), "blocks_used": ("kv_blocks_used", "Blocks of the KV cache in use"),
           "block_tokens": ("kv_block_tokens", "Tokens that a block holds")}
_COUNTERS = {"steps": ("steps", "Steps of the engine"), "prompt_tokens": ("prompt_tokens", "Prompt tokens computed"),
             "generated_tokens": ("generated_tokens", "Tokens generated"),
             "shared_tokens": ("shared_tokens", "Prompt tokens found in the KV cache"),
             "preemptions": ("preemptions", "Sequences that gave their blocks up for others, to be computed again"),
             "finished": ("requests_finished", "Requests that ended by themselves"),
             "cancelled": ("requests_cancelled", "Requests that were cancelled"),
             "refused": ("requests_refused", "Requests refused because the queue was full"),
             "guessed": ("guesses", "Guesses at next tokens (speculative decoding) that were computed"),
             "accepted": ("guesses_accepted", "Guesses that were right: tokens without a step of their own"),
             "busy_s": ("busy_seconds", "Time in steps"),
             "weight_bytes_read": ("weight_bytes_read", "Bytes of weights read from disk in steps (--weight-memory)"),
             "weight_wait_s": ("weight_wait_seconds", "Time in steps that waited for them")}
_EMBEDDING_GAUGES = {"waiting": ("requests_waiting", "Requests for embeddings that aren't answered yet"),
                     "waiting_tokens": ("tokens_waiting", "Their tokens that no turn has taken yet")}
_EMBEDDING_COUNTERS = {"texts": ("texts", "Texts made embeddings"), "tokens": ("tokens", "Tokens of texts made embeddings"),
                       "turns": ("turns", "Batches of texts that were computed together"),
                       "refused": ("requests_refused", "Requests for embeddings refused because the queue was full"),
                       "cancelled": ("requests_cancelled", "Requests for embeddings whose client left"),
                       "busy_s": ("busy_seconds", "Time in computing embeddings")}


class Metrics:
    """Of one server; nothing is registered globally. The engine's figures carry a label `replica` where there are several."""

    def __init__(self, service):
        self._service, self._started = service, time.monotonic()
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(self)
        self.requests = prometheus_client.Counter("unshard_http_requests", "Answers by path and status", ("path", "status"),
                                                  registry=self.registry)
        self.first_token = self._histogram("first_token_seconds", "From a request's arrival to its first token")
        self.between_tokens = self._histogram("between_tokens_seconds", "Between tokens of one sequence")
        self.request_time = self._histogram("request_seconds", "From a request's arrival to its end")
        self.embedding_time = self._histogram("embedding_seconds", "From a request for embeddings to its answer")
        self._recent = {"first_token": collections.deque(maxlen=200), "between_tokens": collections.deque(maxlen=1000)}

    def _histogram(self, name, help):
        return prometheus_client.Histogram(f"unshard_{name}", help, buckets=_SECONDS, registry=self.registry)

    def saw_first_token(self, seconds):
        self.first_token.observe(seconds)
        self._recent["first_token"].append(seconds)

    def saw_token(self, seconds):
        self.between_tokens.observe(seconds)
        self._recent["between_tokens"].append(seconds)

    def collect(self):
        """prometheus_client asks for the engines' own figures, and those of embeddings."""
        model, embeddings = self._service.model, self._service.embeddings
        if model:
            yield from _families("unshard", _GAUGES, _COUNTERS, [engine.stats() for engine in model.engines])
            if len(model.engines) > 1:
                failed = self._service.failures
                yield _by_replica(GaugeMetricFamily, "unshard_replica_up", "1 while the replica serves, 0 when it has failed",
                                  [int(at not in failed) for at in range(len(model.engines))])
        if embeddings:
            yield from _families("unshard_embedding", _EMBEDDING_GAUGES, _EMBEDDING_COUNTERS, [embeddings.stats()])

    def text(self):
        return prometheus_client.generate_latest(self.registry)

    def live(self):
        """What the page draws: the engine's figures, and the median and P95 of recent latencies in seconds (None: none yet)."""
        latencies = {f"{name}_{label}": _quantile(values, share) for name, values in self._recent.items()
                     for label, share in (("median", 0.5), ("p95", 0.95))}
        engine = self._service.dispatcher.stats() if self._service.model else {}
        embeddings = {"embeddings": self._service.embeddings.stats()} if self._service.embeddings else {}
        return {**engine, **embeddings, **latencies, "uptime_s": round(time.monotonic() - self._started, 3)}


def _families(prefix, gauges, counters, stats):
    """stats: of each replica"""
    for family, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for key, (name, help) in figures.items():
            yield _by_replica(family, f"{prefix}_{name}", help, [of_one[key] for of_one in stats])


def _by_replica(family, name, help, values):
    if len(values) == 1:
        return family(name, help, values[0])
    metric = family(name, help, labels=["replica"])
    for at, value in enumerate(values):
        metric.add_metric([str(at)], value)
    return metric


def _quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None
