"""`calibrate`: a Preset for one checkpoint and a wished speedup, the best of a few schedules."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lazyllm.calibration.prompts import CalibrationTasks
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.evaluation.measures import TOKENS
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.results import Key
from lazyllm.evaluation.run import run_items
from lazyllm.evaluation.summary import DENSE_LABEL, Interval, Summary, failure, interval
from lazyllm.evaluation.trial import planned
from lazyllm.llm import LLM, load
from lazyllm.methods.preset import Preset
from lazyllm.prompt import Prompt
from lazyllm.pruning import DENSE, Pruning
from lazyllm.schedule import shape
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.sweeps.sweep import measure_of

PER_KIND, SEED = 3, 102  # generated prompts of each kind and length
FOLDER_SUFFIX = ".calibration"
SHARES = (0.45, 0.55, 0.65, 0.75)
"""By schedule tried: the share of the work left by the speedup that layers below the first stage take."""
FURTHER = ((0.35, 0.85), (0.26, 0.72 / 0.85))
"""Rise and fall, as in `shape`, of their second and third stage, near those of a schedule without an induction head."""


def calibrate(
    llm: LLM | str | Path,
    prompts: Sequence[Prompt] | None = None,
    speedup: float = 2.5,
    out: str | Path | None = None,
    progress: bool = True,
    lengths: Sequence[int] | None = None,
) -> Preset:
    """Tries a few schedules with a wished counted speedup on this checkpoint and returns the best.

    The schedules are that of `Pruning.for_speedup` and others whose first stage stands elsewhere, all with the
    `recommended` scores. Each runs on generated prompts with needles and on your `prompts`. The one that
    finds most needles is returned; among equal ones, the one with the least KL divergence from dense.

    `prompts`: texts, lists of messages or lists of token ids. Text goes through the chat template, where the
    model has one. `lengths`: those of the generated prompts, answer included; the default is 1024 and 2048
    tokens, or the model's context if it is shorter. `out`: a file such as preset.json for the preset;
    measurements go to the folder preset.calibration, from which an interrupted calibration continues.
    """
    if (speedup := checked.number(speedup, "speedup")) < 1:
        raise ValueError(f"speedup must be at least 1, not {speedup:g}")
    if lengths == []:
        raise ValueError("lengths must be at least one number of tokens")
    file = None if out is None else user_path(out)
    if file and (file.suffix != ".json" or file.is_dir()):
        raise ValueError(f"out must be a file whose name ends with .json, not {file}")
    model = llm if isinstance(llm, LLM) else load(llm)
    options = RunOptions(warm_ups=0, progress=progress)
    tasks = CalibrationTasks(model, prompts or (), PER_KIND, SEED, lengths)
    n_prompt = tasks.median_length
    settings = {method.label: method for method in (DENSE, *candidates(speedup, model.config_for(speedup), n_prompt))}
    conditions = {"measure": "calibration", "forced tokens": TOKENS}
    folder = file and file.with_suffix(FOLDER_SUFFIX)
    rows, manifest = run_items(model, settings, tasks, folder, options, measure_of("both", TOKENS), conditions)
    keys = {trial.key for trial in planned(settings, tasks)}
    summary = Summary([row for row in rows if Key.of(row) in keys], category=str)
    for row in summary.failed:
        raise RuntimeError(failure(row))
    measured = {label: measurements(summary, label) for label in settings}
    best = max([*settings][1:], key=lambda label: rank(measured[label]))
    tried = [(method, method.speedup(model.config, n_prompt), measured[label]) for label, method in settings.items()]
    preset = Preset.found(settings[best], manifest, {"trials": len(tasks.ids), "tokens": n_prompt}, tried)
    if file is not None:
        preset.save(file)
    return preset


def candidates(speedup: float, config: ModelConfig, n_prompt: int) -> Iterator[Pruning]:
    """The schedules that a calibration tries; an error if even the first, `for_speedup`, is out of reach."""
    yield Pruning.for_speedup(speedup, config, n_prompt)
    for share in SHARES:
        with suppress(ValueError):  # out of reach
            shapes = [(shape(share, speedup, FURTHER), 0.0)]
            yield Pruning.for_speedup(speedup, config, n_prompt, shapes=shapes)


def measurements(summary: Summary, label: str) -> dict[str, Interval]:
    """A setting's measurements with 95 % intervals; differences are between answers to the same prompts.

    All prompts are one sample. A kind by itself has few prompts, often all found or all missed, and would
    show no variance.
    """
    dense, needles = 100 * summary.paired(label, lambda row: row.get("score"))
    found = {"needles": interval([[needles]], 0, 100)}
    if label == DENSE_LABEL:
        return found
    difference = interval([[needles - dense]], -100, 100)
    return {**found, "needles_to_dense": difference, "kl": interval([[summary.values(label, "kl")]], 0)}


def rank(measured: Mapping[str, Any]) -> tuple[float, float]:
    return measured["needles"][0], -measured["kl"][0]
