"""Installs the wheel with each of its extras, in a fresh environment each, and tries what the extra is for.

    python tests/check_extras.py build/dist [extra …]

`make extras` runs this, with the wheel that `make wheel` has left. It needs PyPI; lm-eval alone fetches
hundreds of megabytes, and the demonstration model is fetched unless the user's cache has it.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from pathlib import Path

from check_dist import MAKE_MODEL, QUIET, TREE, run

BARE = ""
DEMO = """
import subprocess
demo = subprocess.run([sys.argv[2], "demo"], capture_output=True, text=True)
assert "wrote demo-output/demo.html" in demo.stdout, demo
"""
PLOT = """
from lazyllm import longbench
run = longbench.run_niah(lazyllm.load("."), [None], lengths=[500], depths=[50], out="run")
try:
    print("wrote", run.plot())
except ImportError as error:
    print(error)
"""
TO_FRAME = (
    "print(lazyllm.load('.').generate('The sea', {1: 0.5}, max_new_tokens=1, trace=True).trace.to_frame())"
)
TRIALS = {
    BARE: (f"{DEMO}\n{PLOT}", "a picture needs the package matplotlib"),
    "plots": (f"{PLOT}\n{TO_FRAME}", "wrote run/scores.png"),
    "tokenizers": (
        """
import pathlib, tiktoken, folders, toys
from tiny import Shape
folder = pathlib.Path("pieces")
folder.mkdir()
folders.model_folder(folder, Shape(vocab=320), tokenizer=False)
toys.train_pieces(folder)
print(lazyllm.load(folder).generate("the fox", max_new_tokens=3))
""",
        "3 tokens in",
    ),
    "longbench": (
        """
from lazyllm import longbench
for name in ("gov_report", "vcsum"):
    print(longbench.score(name, ["the sea is calm"], [["the sea is calm"]], None))
print(longbench.score("lcc", ["a = 1"], [["a = 1"]], None, edit_sim="levenshtein"))
print(type(longbench.run_niah(lazyllm.load("."), [None], lengths=[500], depths=[50], out="run").to_frame()))
""",
        "pandas",
    ),
    "cuda": ("from lazyllm.machine.device import libraries\nprint(libraries())", "libcublasLt.so"),
    "cluster": (
        """
from lazyllm import longbench
if __name__ == "__main__":
    print(longbench.run_niah(lazyllm.load("."), [None], lengths=[500], depths=[50], out="run", workers=1))
""",
        "run",
    ),
    "search": (
        """
prompts = ["The sea is calm. " * n for n in (10, 11, 12)]
print(lazyllm.search(lazyllm.load("."), prompts, speedup=(1.1, 1.5), budget=2, out="search").text())
""",
        "speedup",
    ),
    "serve": (
        """
from serving import serving
with serving(lazyllm.load(".")) as server:
    print(server.post("/v1/completions", {"prompt": "The sea", "max_tokens": 3}))
""",
        "'completion_tokens': 3",
    ),
    "lm-eval": (
        """
from lazyllm.evaluation.harness import HarnessModel
from lm_eval.api.instance import Instance
model = HarnessModel(".")
request = Instance("loglikelihood", {}, ("The sea", " is calm"), 0)
print("scored", model.loglikelihood([request]))
""",
        "scored [(-",
    ),
}
NOT_TRIED = {"test"}  # make test does


def extras() -> set[str]:
    return set(tomllib.loads((TREE / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def tried(wheel: Path, extra: str) -> None:
    program, expected = TRIALS[extra]
    with tempfile.TemporaryDirectory() as scratch:
        programs, model = Path(scratch) / "venv/bin", Path(scratch) / "model"
        model.mkdir()
        run(sys.executable, "-m", "venv", programs.parent)
        run(programs / "pip", *QUIET, "install", f"{wheel.resolve()}[{extra}]" if extra else wheel.resolve())
        run(programs / "python", "-c", MAKE_MODEL, TREE / "tests", cwd=model)
        script = model / "trial.py"
        script.write_text(f"import sys\nsys.path.append(sys.argv[1])\nimport lazyllm\n{program}")
        output = run(programs / "python", script, TREE / "tests", programs / "lazyllm", cwd=model)
    if expected not in output:
        raise SystemExit(f"{extra or 'no extra'}: {output}\ndoes not contain {expected!r}")
    print(f"{extra or 'no extra'}: installed by itself and tried", flush=True)


def main(folder: Path, chosen: list[str]) -> None:
    if missing := extras() - NOT_TRIED - set(TRIALS):
        raise SystemExit(f"no trial of {sorted(missing)}")
    (wheel,) = folder.glob("*manylinux*.whl")
    for extra in chosen or TRIALS:
        tried(wheel, extra)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
