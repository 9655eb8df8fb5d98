"""Checks the outputs that are in the notebooks; `make notebook` runs them."""

import re

import nbformat
import pytest
from run_notebooks import FOLDER

NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(home|root|tmp|work|Users|usr|opt|mnt)/")


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_in_the_file(name: str) -> None:
    code = [cell for cell in nbformat.read(FOLDER / name, as_version=4).cells if cell.cell_type == "code"]
    assert code[0].source.startswith("# In a fresh environment: %pip install ")
    assert code[0].outputs, "the first cell shows the model"
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], "make notebook writes them"
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    for output in outputs:
        texts = {kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"}
        assert not MACHINE_PATH.search(f"{texts} {output.get('text')}"), "an output names a folder"


def test_there_are_six() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06"]
