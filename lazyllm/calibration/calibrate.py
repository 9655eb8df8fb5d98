"""`calibrate`: a Preset for one checkpoint and a wished speedup."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import lazyllm
from lazyllm.calibration.curves import KEEPS, lost_shares
from lazyllm.calibration.prompts import (
    CURVE_SEED,
    FOR_CURVES,
    FOR_TRIALS,
    TRIAL_SEED,
    CalibrationTasks,
    encoded,
    split,
)
from lazyllm.calibration.schedule import Losses, schedules
from lazyllm.calibration.trials import TrialMeasure, best, results
from lazyllm.checkpoints.digest import weights_digest
from lazyllm.evaluation.divergence import TOKENS
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.results import Key, read_rows
from lazyllm.evaluation.runner import checked_settings, run_items
from lazyllm.evaluation.summary import Row
from lazyllm.evaluation.trial import Measure, planned
from lazyllm.llm import LLM, load
from lazyllm.machine.info import version
from lazyllm.methods import Preset
from lazyllm.prompt import Prompt
from lazyllm.pruning import SPEEDUP_SHAPES, Pruning
from lazyllm.support import checked
from lazyllm.support.files import user_path

DIGITS = 4
FOLDER_SUFFIX = ".calibration"
PACKAGES = ("numpy", "tokenizers")


def calibrate(
    llm: LLM | str | Path,
    prompts: Sequence[Prompt] | None = None,
    speedup: float = 2.5,
    out: str | Path | None = None,
    progress: bool = True,
    lengths: Sequence[int] | None = None,
) -> Preset:
    """Finds the stages that lose least on this checkpoint at a wished counted speedup, and tries them.

    Traced dense passes over generated needles and your `prompts` show how much of what dense later attends to
    each stage would keep. The schedules that lose least on the worst prompts are tried on prompts kept back,
    every third of yours among them, beside `Pruning.for_speedup`. The one that finds most needles is taken;
    of equal ones, that with the least KL divergence from dense.

    `prompts`: texts, lists of messages or lists of token ids. Text goes through the chat template, where the
    model has one. `lengths`: those of the generated prompts, answer included; the default is 1024 and 2048
    tokens, or as many as the model's context has. `out`: a file such as preset.json for the preset, with a
    picture beside it; measurements go to the folder preset.calibration, from which a calibration that was
    interrupted continues.
    """
    speedup = checked.number(speedup, "speedup")
    if speedup < 1:
        raise ValueError(f"speedup must be at least 1, not {speedup:g}")
    file = None if out is None else checked_file(user_path(out))
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of prompts, not one text")
    model = llm if isinstance(llm, LLM) else load(llm)
    own = encoded(model, prompts or (), TOKENS)
    options = RunOptions(warm_ups=0, retry_failed=True, progress=progress)
    target = None if file is None else str(file.with_suffix(FOLDER_SUFFIX))
    with nullcontext(target) if target else TemporaryDirectory(prefix="lazyllm-calibrate-") as folder:
        preset = preset_of(model, own, speedup, Path(folder), options, lengths)
    if file is not None:
        preset.save(file)
        with suppress(ImportError):  # without matplotlib there is no picture
            preset.plot(file.with_suffix(".png"))
    return preset


def checked_file(file: Path) -> Path:
    """The file itself, if a preset can be written there."""
    if file.suffix != ".json":
        raise ValueError(f"out must be a file whose name ends with .json, not {file}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} for {file.name}")
    return file


def preset_of(
    llm: LLM,
    own: Mapping[str, list[int]],
    speedup: float,
    folder: Path,
    options: RunOptions,
    lengths: Sequence[int] | None = None,
) -> Preset:
    """The preset, by what was measured in `folder` and is measured now."""
    for_curves, kept_back = split(own)
    tasks = CalibrationTasks(llm, for_curves, FOR_CURVES, CURVE_SEED, options, lengths)
    n_prompt = tasks.median_tokens(llm)
    # refuses a speedup out of reach
    baseline = Pruning.of_shapes(
        SPEEDUP_SHAPES, speedup, llm.config, n_prompt, lambda schedule: schedule.recommended(n_prompt)
    )
    conditions: dict[str, Any] = {
        "measure": "attention lost",
        "scores": str(Pruning().recommended()),
        "keeps": KEEPS,
        "answer tokens": TOKENS,
    }
    curve_rows = measured(llm, [Pruning()], tasks, folder / "curves", options, lost_shares, conditions)
    losses = Losses.of_prompts([row["lost"] for row in curve_rows], llm.config)
    prunings = list(dict.fromkeys([baseline, *schedules(losses, llm.config, n_prompt, speedup)]))

    tasks = CalibrationTasks(llm, kept_back, FOR_TRIALS, TRIAL_SEED, options, lengths)
    conditions, settings = {"measure": "trial", "forced tokens": TOKENS}, [Pruning(), *prunings]
    rows = measured(llm, settings, tasks, folder / "trials", options, TrialMeasure(TOKENS), conditions)
    trials = results(rows, prunings)
    pruning = best(trials)
    versions = {"lazyllm": lazyllm.__version__, **{name: version(name) for name in PACKAGES}}
    kept = [
        1 - losses.lost[place, :, layer + 1 : -1].mean(axis=1) for place, layer in enumerate(losses.layers)
    ]
    return Preset(
        pruning=pruning,
        speedup=round(pruning.speedup(llm.config, n_prompt), DIGITS),
        model=llm.config.name or llm.checkpoint.path.name,
        sha256=weights_digest(llm.checkpoint, options.progress),
        versions={name: text for name, text in versions.items() if text},
        evidence={
            "prompts": {"curves": len(curve_rows), "trials": len(rows) // len(trials), "tokens": n_prompt},
            # by stages' layers and keeps: the share kept on the worst prompts, mean over the layers above
            "curves": {
                "layers": losses.layers,
                "keeps": losses.keeps,
                "kept": np.array(kept).round(DIGITS).tolist(),
            },
            "candidates": [
                {
                    "pruning": json.loads(candidate.to_json()),
                    "speedup": round(candidate.speedup(llm.config, n_prompt), DIGITS),
                    "loss": round(losses.of(candidate.stages), DIGITS),
                    **trial,
                }
                for candidate, trial in trials.items()
            ],
        },
    )


def measured(
    llm: LLM,
    settings: Sequence[Pruning],
    tasks: CalibrationTasks,
    folder: Path,
    options: RunOptions,
    measure: Measure,
    conditions: Mapping[str, Any],
) -> Sequence[Row]:
    """The rows of these settings and tasks; a failed item is an error here, and runs again next time."""
    methods = checked_settings(settings)
    run_items(llm, methods, tasks, folder, options, measure, conditions)
    keys = {trial.key for trial in planned(methods, tasks)}
    rows = [row for row in read_rows(folder) if Key.of(row) in keys]
    for row in rows:
        if "error" in row:
            raise RuntimeError(f"{row['dataset']}, {row['item']}, {row['setting']}: {row['error']}")
    return rows
