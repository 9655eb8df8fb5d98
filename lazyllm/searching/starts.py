"""Starts: the schedules of a calibration on some of a search's prompts, at each speedup that it searches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lazyllm.calibration.curves import lost_by_stage
from lazyllm.calibration.schedule import Losses, schedules
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning
from lazyllm.searching.space import Space
from lazyllm.support.files import locked, write_whole
from lazyllm.support.progress import bar

FOR_CURVES = 6  # prompts, the first ones
DENSE_SHARES = (0.55, 0.4)  # of those of a calibration, which tries more of them


def calibrated(
    llm: LLM, prompts: Sequence[Sequence[int]], space: Space, file: Path, progress: bool
) -> list[Pruning]:
    """Kept in `file`: a search that goes on has the same, and of several processes one makes them."""
    with locked(file.with_suffix(".lock")):
        if not file.exists():
            made = made_for(llm, prompts, space, progress)
            write_whole(file, json.dumps([one.to_json() for one in made]))
    return [Pruning.from_json(text) for text in json.loads(file.read_text())]


def made_for(llm: LLM, prompts: Sequence[Sequence[int]], space: Space, progress: bool) -> list[Pruning]:
    lost, first = [], prompts[:FOR_CURVES]
    with bar(len(first), "curves", "prompt", progress) as line:
        for ids in first:
            lost.append(lost_by_stage(llm, ids))
            line.update()
    losses = Losses.of_prompts(lost, llm.config)
    several = [
        one
        for share in DENSE_SHARES
        for speedup in space.levels
        for one in schedules(losses, llm.config, space.n_prompt, speedup, [share])
    ]
    return [one for one in dict.fromkeys(several) if space.holds(one)]
