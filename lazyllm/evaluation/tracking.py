"""Tracking: new rows of a run as metrics of MLflow runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from lazyllm.support.optional import package


def mlflow_rows(experiment: str, uri: str | None = None) -> Callable[[Mapping[str, Any]], None]:
    """A function for `on_row` that logs to MLflow: each setting is a run of the experiment, each row a step.

    Logged are the numbers of a row, times as timing.ttft and so on, and failed, which is 1 for a failed item.
    `uri` is the tracking server or store; the default is MLflow's own.
    """
    mlflow = package("mlflow", "mlflow_rows", "mlflow")
    client = mlflow.MlflowClient(tracking_uri=uri)
    earlier = client.get_experiment_by_name(experiment)
    experiment_id = earlier.experiment_id if earlier else client.create_experiment(experiment)
    runs: dict[str, str] = {}
    steps: Counter[str] = Counter()

    def log(row: Mapping[str, Any]) -> None:
        setting = row["setting"]
        if setting not in runs:
            run = client.create_run(experiment_id, run_name=setting, tags={"setting": setting})
            runs[setting] = run.info.run_id
        now, step = int(1000 * time.time()), steps[setting]
        metrics = [mlflow.entities.Metric(name, value, now, step) for name, value in numbers(row).items()]
        client.log_batch(runs[setting], metrics=metrics)
        client.set_terminated(runs[setting])  # the next row, if there is one, can still be logged
        steps[setting] += 1

    return log


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the fields of a row and of its times."""
    fields = {**row, **{f"timing.{name}": value for name, value in row.get("timing", {}).items()}}
    numeric = {name: float(value) for name, value in fields.items() if type(value) in (int, float)}
    return {**numeric, "failed": float("error" in row)}
