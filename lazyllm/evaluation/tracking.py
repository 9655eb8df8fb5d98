"""Tracking: new rows of a run as metrics of MLflow runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any


def mlflow_rows(experiment: str, uri: str | None = None) -> Callable[[Mapping[str, Any]], None]:
    """A function for `on_row` that logs to MLflow: each setting is a run of the experiment, each row a step.

    Logged are the numbers of a row, times as timing.ttft and so on, and failed, which is 1 for a failed item.
    `uri` is the tracking server or store; the default is MLflow's own.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric
    except ImportError:
        raise ImportError("mlflow_rows needs MLflow: pip install 'lazyllm-engine[mlflow]'") from None
    client = MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name(experiment)
    experiment_id = known.experiment_id if known else client.create_experiment(experiment)
    runs: dict[str, str] = {}
    steps: dict[str, count[int]] = {}

    def log(row: Mapping[str, Any]) -> None:
        setting = row["setting"]
        if setting not in runs:
            made = client.create_run(experiment_id, run_name=setting, tags={"setting": setting})
            runs[setting], steps[setting] = made.info.run_id, count()
        now, step = int(1000 * time.time()), next(steps[setting])
        metrics = [Metric(name, value, now, step) for name, value in numbers(row).items()]
        client.log_batch(runs[setting], metrics=metrics)
        client.set_terminated(runs[setting])  # the next row, if there is one, can still be logged

    return log


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the fields of a row and of its times."""
    fields = {**row, **{f"timing.{name}": value for name, value in row.get("timing", {}).items()}}
    told = {
        name: float(value)
        for name, value in fields.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {**told, "failed": float("error" in row)}
