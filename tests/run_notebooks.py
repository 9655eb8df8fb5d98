"""Runs every notebook from the start; with --write, saves the outputs in the files."""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"


def run(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="save the outputs in the files")
    write = parser.parse_args().write
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = run(path)
        if write:
            nbformat.write(notebook, path)
        print(f"{path.name}: ran")


if __name__ == "__main__":
    main()
