"""Figures: what the server measures, for Prometheus and for its own page."""

import json
import time
from collections import defaultdict, deque
from functools import partial
from statistics import fmean
from typing import Any

import prometheus_client as prometheus

from lazyllm.generation import Generation
from lazyllm.method import Method
from lazyllm.prefix_cache import PrefixCache
from lazyllm.serving.turns import Turns

MOST_SETTINGS, OTHERS = 32, "others"  # labels: clients may send any setting
HAPPENED = ("speedup", "computed", "reached_top", "seconds", "unpruned")
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
            kind = partial(prometheus.Histogram, buckets=SECONDS) if name.endswith("seconds") else prometheus.Summary
            self._metrics[name] = kind(f"lazyllm_{name}", meaning, ["setting"], registry=self.registry)
        shared = cache or PrefixCache()  # which stays empty
        of_server = {
            "running": ("requests that run", lambda: min(turns.requests, turns.at_once)),
            "waiting": ("requests that wait", lambda: max(0, turns.requests - turns.at_once)),
            "cache_bytes": ("memory of the beginnings that prompts share", lambda: shared.bytes),
            "cache_hits": ("prompts that began like an earlier one", lambda: shared.hits),
            "cache_tokens": ("tokens that these have shared", lambda: shared.tokens_shared),
        }
        for name, (meaning, value) in of_server.items():
            prometheus.Gauge(f"lazyllm_{name}", meaning, registry=self.registry).set_function(value)

    def observe(self, setting: Method, n_prompt: int, **values: float | None) -> float | None:
        """Records values by the names of metrics; returns the mean of the setting's measured speedups, None
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

    def answered(self, setting: Method, generation: Generation) -> dict[str, Any]:
        """Records an answer in the metrics; returns the effect of the setting on it, as plain data."""
        steps, passes = len(generation.token_ids) - 1, generation.passes
        revived = int(passes["revived"].sum())
        measured = self.observe(
            setting,
            generation.n_given,
            first_token_seconds=generation.ttft,
            decode_step_seconds=(generation.seconds - generation.ttft) / steps if steps else None,
            counted_speedup=generation.speedup,
            computed_share=generation.computed,
            revived_rows=revived / steps if steps else None,
        )
        return {
            "pruning": json.loads(generation.pruning.to_json()),
            "in_play": passes["in_play"][passes["pass_"] == 0].tolist(),
            "revived": revived,
            "seconds_to_first_token": generation.ttft,
            "measured_speedup": measured,
            **{name: getattr(generation, name) for name in HAPPENED},
        }

    def last_hour(self) -> list[dict[str, Any]]:
        return [point for point in list(self._points) if point["time"] > time.time() - HOUR]
