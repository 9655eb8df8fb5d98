"""Runs each notebook from the start and checks its outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_notebooks import FOLDER, run


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_runs_from_the_top(name: str, demo_model: Path) -> None:
    notebook = run(FOLDER / name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code, f"{name} has no code"
    assert any(cell.outputs for cell in code), f"{name} shows nothing"


def test_there_are_notebooks() -> None:
    assert list(FOLDER.glob("*.ipynb"))
