"""Figures for Prometheus: the engine's own, read when asked for, and what only the servers see."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from atlas_jax.serve.backend import Backend

prometheus.disable_created_metrics()  # a series more for each counter, which nobody asks for
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)
TOTAL_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Record:
    """Times one request; `outcome` is how it ended."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first = self.last = 0.0
        self.count = 0
        self.outcome = "disconnected"
        self.open = True

    def tokens(self, count: int) -> None:
        if count:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.count += count


class Metrics:
    """`registry` has everything; `text()` is Prometheus's format."""

    def __init__(self, backend: Any) -> None:
        self.registry = prometheus.CollectorRegistry()
        new: dict[str, Any] = dict(registry=self.registry)
        self._ttft = prometheus.Histogram(
            "atlas_time_to_first_token_seconds", "From taking a request to its first token", buckets=TTFT_BUCKETS, **new
        )
        self._tpot = prometheus.Histogram(
            "atlas_time_per_output_token_seconds",
            "Mean of each answer after its first piece",
            buckets=TPOT_BUCKETS,
            **new,
        )
        self._total = prometheus.Histogram(
            "atlas_request_seconds", "From taking a request to its end", buckets=TOTAL_BUCKETS, **new
        )
        self._requests = prometheus.Counter("atlas_requests", "Requests by how they ended", ["outcome"], **new)
        self._responses = prometheus.Counter("atlas_responses", "Responses", ["server", "method", "status"], **new)
        self._slow = prometheus.Counter("atlas_slow_readers", "Streams given up since nobody read them", **new)
        self.registry.register(_Engine(backend))

    def record(self, record: Record, outcome: str) -> None:
        """Counts a request that is over."""
        now, record.open = time.perf_counter(), False
        self._requests.labels(outcome).inc()
        self._total.observe(now - record.began)
        if record.count:
            self._ttft.observe(record.first - record.began)
        if record.count > 1 and record.last > record.first:
            self._tpot.observe((record.last - record.first) / (record.count - 1))

    def response(self, server: str, method: str, status: str) -> None:
        self._responses.labels(server, method, status).inc()

    def slow_reader(self) -> None:
        self._slow.inc()

    def text(self) -> bytes:
        return prometheus.generate_latest(self.registry)


class _Engine(Collector):
    """The engine's figures at the moment of asking."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering asks for nothing

    def collect(self) -> Iterator[Metric]:
        ready = self._backend.state == "running"
        yield GaugeMetricFamily("atlas_ready", "Whether requests are taken", value=int(ready))
        if self._backend.state == "loading":
            return
        stats = self._backend.engine.stats()
        gauges = dict(
            running="Requests that have a slot",
            waiting="Requests without a slot",
            slots="Requests that can run together",
            tokens_per_s="Tokens emitted per second, lately",
            pages="KV pages",
            pages_free="KV pages that hold nothing",
        )
        for name, text in gauges.items():
            yield GaugeMetricFamily(f"atlas_{name}", text, value=getattr(stats, name))
        counters = dict(
            submitted="Requests taken",
            refused="Requests turned away",
            prompt_tokens="Tokens of prompts",
            restored_tokens="Tokens of prompts that the prefix cache saved",
            tokens="Tokens emitted",
            dispatches="Dispatches of rounds",
            compiled_late="Kinds of requests that were compiled when first asked for",
        )
        for name, text in counters.items():
            yield CounterMetricFamily(f"atlas_{name}", text, value=getattr(stats, name))
        finished = CounterMetricFamily("atlas_finished", "Requests that ended, by reason", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        acceptance = stats.acceptance
        for name in ("offered", "matched", "reached", "accepted"):
            family = CounterMetricFamily(f"atlas_drafts_{name}", f"Drafts {name}, by position", labels=["position"])
            for i, count in enumerate(getattr(acceptance, name)):
                family.add_metric([str(i + 1)], int(count))
            yield family
        yield CounterMetricFamily("atlas_verifies", "Verifies", value=acceptance.steps)
        for name in ("offered", "accepted"):
            family = CounterMetricFamily(f"atlas_source_drafts_{name}", f"Drafts {name}, by source", labels=["source"])
            for source, part in acceptance.by_source().items():
                family.add_metric([source], int(getattr(part, name).sum()))
            yield family
        cache = stats.cache
        for name in ("requests", "hits", "saved", "evicted", "poisoned"):
            yield CounterMetricFamily(f"atlas_cache_{name}", f"Prefix cache: {name}", value=getattr(cache, name))
        for name, text in dict(matched="held by pages", restored="not computed", replayed="computed").items():
            count = getattr(cache.reuse, name)
            yield CounterMetricFamily(f"atlas_cache_{name}_tokens", f"Tokens of prompts: {text}", value=count)
        share, text = cache.reuse.granularity_share, "Of replayed tokens, what snapshots everywhere would have saved"
        yield GaugeMetricFamily("atlas_cache_granularity_share", text, value=share)
