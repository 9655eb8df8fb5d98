"""Runs notebooks from the start, one after the other; with --write, saves the outputs in the files."""

import argparse
from pathlib import Path
from time import perf_counter

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
CELL_SECONDS = 900  # on a machine with much other work


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs; a cell that raises is a CellExecutionError with its source."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="files; all of notebooks/ without any")
    parser.add_argument("--write", action="store_true", help="save the outputs in the files")
    args = parser.parse_args()
    for path in args.notebooks or sorted(FOLDER.glob("*.ipynb")):
        start = perf_counter()
        notebook = run(path)
        if args.write:
            nbformat.write(notebook, path)
        print(f"{path.name}: {perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
