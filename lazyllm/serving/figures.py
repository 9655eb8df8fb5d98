"""Figures: what the server measures, for Prometheus and for its own page."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import fmean
from typing import Any

import prometheus_client as prometheus

from lazyllm.generation import Generation
from lazyllm.method import Method
from lazyllm.prefix_cache import PrefixCache
from lazyllm.serving.turns import Turns

MOST_SETTINGS, OTHERS = 32, "others"  # labels: clients may send any setting
HOUR, MOST_POINTS, MOST_MEASURED = 3600, 2000, 100
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
BY_SETTING = {
    "first_token_seconds": "from the token ids to the first new one",
    "decode_step_seconds": "mean decode step of an answer",
    "counted_speedup": "operations of a dense prefill over those run",
    "measured_speedup": "seconds of a dense prefill over the setting's",
    "computed_share": "(token, layer) pairs computed by an answer's end",
    "revived_rows": "rows revived in a decode step, mean of an answer",
    "divergence_nats": "KL from dense, mean of the first tokens",
    "equal_answers": "1 where dense's first tokens are the setting's",
}


class Figures:
    """The metrics of one server, and for its page the points of the last hour: answers and comparisons."""

    def __init__(self, turns: Turns, cache: PrefixCache | None) -> None:
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)  # memory, among others
        self._points = deque[dict[str, Any]](maxlen=MOST_POINTS)
        self._measured = defaultdict[str, deque[float]](lambda: deque(maxlen=MOST_MEASURED))
        self._metrics = dict[str, Any]()
        for name, meaning in BY_SETTING.items():
            about = {"labelnames": ["setting"], "registry": self.registry}
            kind = prometheus.Summary
            if name.endswith("seconds"):
                kind, about["buckets"] = prometheus.Histogram, SECONDS
            self._metrics[name] = kind(f"lazyllm_{name}", meaning, **about)
        gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("running", "requests that run", lambda: turns.requests - turns.waiting),
            ("waiting", "requests that wait", lambda: turns.waiting),
        ]
        if cache:
            gauges += [
                ("cache_bytes", "memory of the beginnings that prompts share", lambda: cache.bytes),
                ("cache_hits", "prompts that began like an earlier one", lambda: cache.hits),
                ("cache_tokens", "tokens that these have shared", lambda: cache.tokens_shared),
            ]
        for name, meaning, value in gauges:
            prometheus.Gauge(f"lazyllm_{name}", meaning, registry=self.registry).set_function(value)

    def observe(self, setting: Method, n_prompt: int, **values: float | None) -> float | None:
        """Takes values by the names of metrics; returns the mean of the setting's measured speedups, None
        before there is one. Settings share a label once there are many."""
        if len(self._measured) < MOST_SETTINGS:
            self._measured[setting.label]
        label = setting.label if setting.label in self._measured else OTHERS
        for name, value in values.items():
            if value is not None:
                self._metrics[name].labels(label).observe(value)
        self._points.append({"time": time.time(), "setting": label, "prompt_tokens": n_prompt, **values})
        measured = self._measured[label]
        if (speedup := values.get("measured_speedup")) is not None:
            measured.append(speedup)
        return fmean(measured) if measured else None

    def answered(self, setting: Method, generation: Generation) -> float | None:
        """`observe` for an answer."""
        steps = len(generation.token_ids) - 1
        return self.observe(
            setting,
            generation.n_given,
            first_token_seconds=generation.ttft,
            decode_step_seconds=(generation.seconds - generation.ttft) / steps if steps else None,
            counted_speedup=generation.speedup,
            computed_share=generation.computed,
            revived_rows=int(generation.passes["revived"].sum()) / steps if steps else None,
        )

    def text(self) -> bytes:
        """The metrics in Prometheus' format."""
        return bytes(prometheus.generate_latest(self.registry))

    def last_hour(self) -> list[dict[str, Any]]:
        return [point for point in list(self._points) if point["time"] > time.time() - HOUR]
