"""Installs the wheel with each of its extras, in a fresh environment each, and tries what the extra is for.

    python tests/check_extras.py build/dist [extra …]

`make extras` runs this, with the wheel that `make wheel` has left. It needs PyPI; lm-eval alone fetches
hundreds of megabytes, and the demonstration model is fetched unless the user's cache has it.
"""

import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path

from check_dist import TREE, fresh, run

DEMO = """
import subprocess
demo = subprocess.run([sys.argv[2], "demo"], capture_output=True, text=True)
assert "wrote demo-output/demo.html" in demo.stdout, demo
"""
PLOT = """
try:
    print("wrote", run().plot())
except ImportError as error:
    print(error)
"""
TO_FRAME = "print(llm.generate('The sea', {1: 0.5}, max_new_tokens=1, trace=True).trace.to_frame())"
PIECES = """
import pathlib, tiktoken, folders, toys
from tiny import Shape
folder = pathlib.Path("pieces")
folder.mkdir()
folders.model_folder(folder, Shape(vocab=320), tokenizer=False)
toys.train_pieces(folder)
print(lazyllm.load(folder).generate("the fox", max_new_tokens=3).summary)
"""
SCORES = """
for name in ("gov_report", "vcsum"):
    print(longbench.score(name, ["the sea is calm"], [["the sea is calm"]], None))
print(longbench.score("lcc", ["a = 1"], [["a = 1"]], None, edit_sim="levenshtein"), type(run().to_frame()))
"""
SEARCH = """
prompts = ["The sea is calm. " * n for n in (10, 11, 12)]
print(lazyllm.search(llm, prompts, speedup=(1.1, 1.5), budget=2, out="search").text())
"""
SERVE = """
from serving import serving
with serving(llm) as server:
    print(server.post("/v1/completions", {"prompt": "The sea", "max_tokens": 3}))
"""
HARNESS = """
from lazyllm.evaluation.harness import HarnessModel
from lm_eval.api.instance import Instance
request = Instance("loglikelihood", {}, ("The sea", " is calm"), 0)
print("scored", HarnessModel(".").loglikelihood([request]))
"""
BEGIN = """
import sys
sys.path.append(sys.argv[1])
import lazyllm
from lazyllm import longbench
llm = lazyllm.load(".")
def run(**options):
    return longbench.run_niah(llm, [None], lengths=[500], depths=[50], out="run", **options)
if __name__ == "__main__":
"""
TRIALS = {
    "": (DEMO + PLOT, "a picture needs the package matplotlib"),
    "plots": (PLOT + TO_FRAME, "wrote run/scores.png"),
    "tokenizers": (PIECES, "3 tokens in"),
    "longbench": (SCORES, "pandas"),
    "cuda": ("from lazyllm.machine.device import libraries\nprint(libraries())", "libcublasLt.so"),
    "cluster": ("print(run(workers=1))", "run"),
    "search": (SEARCH, "speedup"),
    "serve": (SERVE, "'completion_tokens': 3"),
    "lm-eval": (HARNESS, "scored [(-"),
}
"""By extra, a program, and a part of what it must print."""


def tried(wheel: Path, extra: str) -> None:
    program, expected = TRIALS[extra]
    with tempfile.TemporaryDirectory() as scratch:
        programs, model = fresh(Path(scratch), f"{wheel.resolve()}[{extra}]" if extra else wheel.resolve())
        script = model / "trial.py"
        script.write_text(BEGIN + textwrap.indent(program, "    "))
        output = run(programs / "python", script, TREE / "tests", programs / "lazyllm", cwd=model)
    if expected not in output:
        raise SystemExit(f"{extra or 'no extra'}: {output}\ndoes not contain {expected!r}")
    print(f"{extra or 'no extra'}: installed by itself and tried", flush=True)


def main(folder: Path, chosen: list[str]) -> None:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    if missing := set(project["optional-dependencies"]) - {"test"} - set(TRIALS):  # make test tries that
        raise SystemExit(f"no trial of {sorted(missing)}")
    (wheel,) = folder.glob("*manylinux*.whl")
    for extra in chosen or TRIALS:
        tried(wheel, extra)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
