"""The version, what a build of the CUDA core asks for, and the cache of make's programs. `make wheel` does the rest."""

import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
from check_dist import TREE

import lazyllm


def output_of(*command: str, env: dict[str, str] | None = None) -> str:
    return subprocess.run(command, cwd=TREE, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("wish", "nvcc", "fetched"), [("1", None, True), ("1", "/usr/bin/nvcc", False), ("auto", None, False)]
)
def test_a_build_of_the_cuda_core_fetches_an_nvcc_where_there_is_none(
    wish: str, nvcc: str | None, fetched: bool
) -> None:
    """In a process of its own: setuptools replaces distutils, which another test may have imported."""
    code = (
        "import build_cuda, build_backend\n"
        f"build_cuda.find_nvcc = lambda: {nvcc!r}\n"
        "print(build_backend.get_requires_for_build_wheel())"
    )
    environment = os.environ | {"LAZYLLM_CUDA": wish, "PYTHONPATH": str(TREE / "cuda")}
    shown = output_of(sys.executable, "-c", code, env=environment)
    assert ("nvcc" in shown.splitlines()[-1]) == fetched


def test_the_changelog_begins_with_this_version() -> None:
    """The version stands in lazyllm/__init__.py only; the metadata has it from there."""
    heading = re.search(r"^## \[(.*)\]", (TREE / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert heading[1] == lazyllm.__version__
    assert metadata.version("lazyllm-engine") == lazyllm.__version__


def test_make_uses_the_cache_of_the_command_line() -> None:
    """One place for the demonstration model: the programs' own default, unless the user names another."""
    environment = {name: value for name, value in os.environ.items() if name[:4] not in ("LAZY", "MAKE")}
    show = ["--eval", 'show: ; @echo "cache is $$LAZYLLM_CACHE."', "show"]
    assert output_of("make", "--no-print-directory", *show, env=environment) == "cache is .\n"
