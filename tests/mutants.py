"""Changes the C core in one place at a time and looks whether the tests notice: `make mutants`.

Each mutant is one random change of csrc/*.c or csrc/cpu/*.c: an operator, a comparison, a number, a
statement left out, a condition turned round. Its file alone is compiled anew, in a copy of the tree.
The C tests and then each test file run, those first that killed most for their time so far, until one fails.
build/mutants/results.jsonl has a line for each mutant; a run that is started again goes on from there. What
survived is tried again after a change of the tests.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

HOME = Path("build/mutants")
TREE = HOME / "tree"
RESULTS = HOME / "results.jsonl"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
FLAGS = ["-std=gnu11", "-g1", "-pthread", "-w"]
OPTIMIZED = [*FLAGS, "-O3", "-fPIC"]
C_TESTS = "test_ops"
MOST_MEMORY = 12 << 30  # of a mutant's address space, in bytes

# what is no code: comments, text, lines of the preprocessor
SILENT = re.compile(
    r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M
)
SWAPS = {
    "comparison": "< <=, <= <, > >=, >= >, == !=, != ==",
    "operator": "+ -, - +, * /, / *, % *, += -=, -= +=, & |, | &, << >>, >> <<, && ||, || &&",
}  # what stands between two blanks, and what in its place
NUMBER = re.compile(r"(?<![\w.])(\d+)(?=[;,)\]\s}])")
STATEMENT = re.compile(
    r"^(?: +|.*\) )((?:\*?\w+(?:->\w+|\.\w+|\[[^\]]*\])* (?:[-+*/|&]?= )|\w+\(|break|continue)[^\n]*;)$", re.M
)
CONDITION = re.compile(r"\bif \(")


@dataclass(frozen=True)
class Mutant:
    """The bytes `start` to `end` of a file, and what stands in their place."""

    file: str
    start: int
    end: int
    kind: str
    new: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def diff(self, text: str) -> str:
        """The line before and after the change."""
        begin = text.rfind("\n", 0, self.start) + 1
        end = text.find("\n", self.end)
        before = text[begin:end]
        after = text[begin : self.start] + self.new + text[self.end : end]
        return f"{self.file}:{text.count(chr(10), 0, begin) + 1}\n-{before}\n+{after}"


def closing(code: str, opening: int) -> int:
    """The index of the bracket that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        if not depth:
            return i
    raise ValueError("a bracket is not closed")


def mutants_of(file: str, text: str) -> list[Mutant]:
    code = SILENT.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
    found = [
        Mutant(file, match.start(1), match.end(1), kind, new)
        for kind, swaps in SWAPS.items()
        for old, new in (swap.split() for swap in swaps.split(", "))
        for match in re.finditer(f" ({re.escape(old)}) ", code)
    ]
    found += [Mutant(file, m.start(), m.end(), "number", str(int(m[1]) + 1)) for m in NUMBER.finditer(code)]
    found += [Mutant(file, m.start(1), m.end(1), "statement", ";") for m in STATEMENT.finditer(code)]
    for match in CONDITION.finditer(code):
        begin = match.end() - 1
        end = closing(code, begin) + 1
        found.append(Mutant(file, begin, end, "condition", f"(!{text[begin:end]})"))
    return found


def run(command: list[str], **options: Any) -> str:
    return subprocess.run(command, cwd=TREE, check=True, capture_output=True, text=True, **options).stdout


def refresh() -> str:
    """Copies what git knows of, and what is new, to the tree; returns a digest of the tests."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    tests = hashlib.sha256()
    for name in sorted(listed):
        source, copy = Path(name), TREE / name
        if not source.is_file():
            copy.unlink(missing_ok=True)
            continue
        data = source.read_bytes()
        if not copy.is_file() or copy.read_bytes() != data:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
        if name.startswith("tests/"):
            tests.update(data)
    return tests.hexdigest()[:16]


def compiled(source: str, place: str, to: Path) -> bool:
    """Compiles C as if it were in the folder `place` of the tree."""
    command = ["gcc", *OPTIMIZED, "-iquote", place, "-x", "c", "-", "-c", "-o", str(to)]
    done = subprocess.run(command, cwd=TREE, input=source, text=True, capture_output=True, check=False)
    return done.returncode == 0


def link(objects: list[str]) -> None:
    """The C tests, and the extension, of the core's objects."""
    run(["gcc", "-pthread", "build/test_ops.o", *objects, "-lm", "-o", "build/test_ops"])
    wrapper = sorted(str(path.relative_to(TREE)) for path in (TREE / "build/python").glob("*.o"))
    run(["gcc", "-shared", "-pthread", *wrapper, *objects, "-lm", "-o", f"lazyllm/_core{SUFFIX}"])


def build() -> list[str]:
    """Everything without a mutant; returns the core's objects."""
    run(["make", "build/core/core.a", f"CFLAGS_TEST={' '.join(FLAGS)}"])
    run(["gcc", *OPTIMIZED, "-c", "tests/c/test_ops.c", "-o", "build/test_ops.o"])
    (TREE / "build/python").mkdir(exist_ok=True)
    includes = ["-I", numpy.get_include(), "-I", sysconfig.get_path("include")]
    for source in (TREE / "csrc/python").glob("*.c"):
        name = str(source.relative_to(TREE))
        run(["gcc", *OPTIMIZED, *includes, "-c", name, "-o", f"build/python/{source.stem}.o"])
    return sorted(str(path.relative_to(TREE)) for path in (TREE / "build/core").rglob("*.o"))


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def failure(test: str, seconds: float | None) -> str | None:
    """Runs one test program; returns what failed, or None."""
    command = [f"build/{C_TESTS}"] if test == C_TESTS else [
        sys.executable, "-m", "pytest", "-x", "-q", "-m", "not oracle", "-p", "no:cacheprovider", test
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(TREE.resolve()), "LAZYLLM_TEST_CORE": str(TREE.resolve())}
    child = subprocess.Popen(
        command,
        cwd=TREE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=bounded,
    )
    try:
        told, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        told = "no end in time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode in (0, 5):  # 5: the file has no tests here
        return None
    found = re.search(r"^(?:FAILED|ERROR) .*$", told, re.M)
    return found[0][:200] if found else told.strip()[-200:] or f"ended with {child.returncode}"


def measured(tests: list[str]) -> dict[str, float]:
    """The seconds of each test program without a mutant, kept until it changes; refuses what fails."""
    file = HOME / "seconds.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    seconds = {}
    for test in tests:
        source = TREE / ("tests/c/test_ops.c" if test == C_TESTS else test)
        name = f"{test} {hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
        if name not in known:
            start = time.monotonic()
            told = failure(test, None)
            if told:
                raise SystemExit(f"{test} fails without a mutant: {told}")
            known[name] = time.monotonic() - start
            file.write_text(json.dumps(known))
            print(f"{test} without a mutant: {known[name]:.1f} s", flush=True)
        seconds[test] = known[name]
    return seconds


def judged(tests: dict[str, float], kills: dict[str, int]) -> tuple[str, str, str]:
    """The outcome, the test that killed, and its words."""
    for test in sorted(tests, key=lambda test: tests[test] / (1 + kills[test])):
        told = failure(test, 5 * tests[test] + 20)
        if told:
            return "killed", test, told
    return "survived", "", ""


def report(results: list[dict[str, Any]]) -> None:
    outcomes = collections.Counter(row["outcome"] for row in results)
    tried = outcomes["killed"] + outcomes["survived"]
    for row in results:
        if row["outcome"] == "survived":
            print(f"survived: {row['kind']}, {row['diff']}\n")
    print(f"killed {outcomes['killed']} of {tried} ({outcomes['killed'] / max(tried, 1):.0%})")
    print(f"left out: {outcomes['same code']} of equal machine code, {outcomes['no C']} that do not compile")
    print("by", dict(collections.Counter(row["by"] for row in results if row["by"]).most_common()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("n", type=int, help="how many mutants")
    parser.add_argument("tests", nargs="+", help="test files, as tests/test_method.py")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (1)")
    asked = parser.parse_args()

    tests = refresh()
    objects = build()
    link(objects)
    sources = {
        str(path.relative_to(TREE)): path.read_text()
        for folder in ("csrc", "csrc/cpu")
        for path in sorted((TREE / folder).glob("*.c"))
    }
    everything = b"".join(path.read_bytes() for path in sorted((TREE / "csrc").rglob("*.[ch]")))
    core = hashlib.sha256(everything).hexdigest()[:16]
    chosen = [mutant for file, text in sources.items() for mutant in mutants_of(file, text)]
    random.Random(asked.seed).shuffle(chosen)
    chosen = chosen[: asked.n]

    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    known = {json.dumps(row["mutant"]): row for row in rows if row["core"] == core}
    kills = collections.Counter(row["by"] for row in known.values())
    seconds = measured([C_TESTS, *asked.tests])

    for number, mutant in enumerate(chosen, 1):
        name = json.dumps(asdict(mutant))
        row = known.get(name)
        if row and (row["outcome"] != "survived" or row["tests"] == tests):
            continue
        start = time.monotonic()
        place = str(Path(mutant.file).parent)
        whole = f"build/core/{Path(mutant.file).relative_to('csrc').with_suffix('.o')}"
        plain, changed = HOME.resolve() / "plain.o", HOME.resolve() / "mutant.o"
        outcome, by, told = "no C", "", ""
        if compiled(mutant.apply(sources[mutant.file]), place, changed):
            compiled(sources[mutant.file], place, plain)
            outcome = "same code"
            if plain.read_bytes() != changed.read_bytes():
                link([str(changed) if one == whole else one for one in objects])
                outcome, by, told = judged(seconds, kills)
        kills[by] += 1
        known[name] = {
            "mutant": asdict(mutant),
            "kind": mutant.kind,
            "diff": mutant.diff(sources[mutant.file]),
            "outcome": outcome,
            "by": by,
            "told": told,
            "seconds": round(time.monotonic() - start, 1),
            "core": core,
            "tests": tests,
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(known[name]) + "\n")
        took = known[name]["seconds"]
        print(f"{number} of {len(chosen)}: {outcome} {by} ({took} s), {mutant.file}", flush=True)
    report([known[name] for mutant in chosen if (name := json.dumps(asdict(mutant))) in known])


if __name__ == "__main__":
    main()
