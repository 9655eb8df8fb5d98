"""Changes the C core in one place at a time and looks whether the tests notice: `make mutants`.

Each mutant is one random change of csrc/: an operator, a comparison, a number, a statement left out, a
condition turned round. It is built in a copy of the tree; then the C tests and each test file run, those
first that killed most for their time so far, until one fails. tests/mutants.jsonl has a line for each mutant,
and a run that is started again goes on from there; what survived is tried again after a change of the tests.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOME = Path("build/mutants")
TREE = (HOME / "tree").resolve()
RESULTS = Path("tests/mutants.jsonl")
CORE = TREE / "build/core_mutants/lib"
C_TESTS = ["build/test_ops_mutants", "build/test_system_mutants"]

# comments, text, and lines of the preprocessor
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
    """The characters `start` to `end` of a file, and what stands in their place."""

    file: str
    start: int
    end: int
    kind: str
    new: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def diff(self, text: str) -> str:
        """The file, and the line before and after the change: the mutant's name while other lines change."""
        begin = text.rfind("\n", 0, self.start) + 1
        end = text.find("\n", self.end)
        before = text[begin:end]
        after = text[begin : self.start] + self.new + text[self.end : end]
        return f"{self.file}\n-{before}\n+{after}"


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
        if name.startswith("tests/") and source != RESULTS:
            tests.update(data)
    return tests.hexdigest()[:16]


def build() -> str | None:
    """A digest of the built core, or None where it does not compile."""
    stamp = Path(sys.prefix) / "test.stamp"  # the packages are there
    command = ["make", "-j2", f"VENV={sys.prefix}", f"--old-file={stamp}", *C_TESTS, "build/core_mutants/lib"]
    done = subprocess.run(command, cwd=TREE, capture_output=True, check=False)
    if done.returncode:
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in (CORE / "lazyllm").glob("*.so"))).hexdigest()


def failure(test: str, seconds: float | None) -> str | None:
    """Runs one test program; returns what failed, or None."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not oracle", "-p", "no:cacheprovider"]
    pytest += ["-o", f"pythonpath={CORE} .", test]
    child = subprocess.Popen(
        [test] if test in C_TESTS else pytest,
        cwd=TREE,
        env={**os.environ, "PYTHONPATH": f"{CORE}:{TREE}", "LAZYLLM_TEST_CORE": str(CORE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return "no end in time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode in (0, 5):  # 5: the file has no tests here
        return None
    found = re.search(r"^(?:FAILED|ERROR) \S+", output, re.M)
    return found[0] if found else f"ended with {child.returncode}"


def measured(tests: list[str]) -> dict[str, float]:
    """The seconds of each test program without a mutant, kept until it changes; refuses what fails."""
    file = HOME / "seconds.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    seconds = {}
    for test in tests:
        source = TREE / (f"tests/c/{Path(test).name}.c" if test in C_TESTS else test)
        name = f"{source.name} {hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
        if name not in known:
            start = time.monotonic()
            if message := failure(test, None):
                raise SystemExit(f"{source.name} fails without a mutant: {message}")
            known[name] = time.monotonic() - start
            file.write_text(json.dumps(known))
            print(f"{source.name} without a mutant: {known[name]:.1f} s", flush=True)
        seconds[test] = known[name]
    return seconds


def judged(tests: dict[str, float], kills: dict[str, int]) -> tuple[str, str, str]:
    """The outcome, the test that killed, and its words."""
    for test in sorted(tests, key=lambda test: tests[test] / (1 + kills[test])):
        if message := failure(test, 2 * tests[test] + 60):
            return "killed", test, message
    return "survived", "", ""


def report(results: list[dict[str, Any]]) -> None:
    outcomes = collections.Counter(row["outcome"] for row in results)
    tried = outcomes["killed"] + outcomes["survived"]
    for row in results:
        if row["outcome"] == "survived":
            print(f"survived: {row['kind']}, {row['diff']}\n")
    print(f"killed {outcomes['killed']} of {tried} ({outcomes['killed'] / max(tried, 1):.0%})")
    print(f"left out: {outcomes['same code']} of equal machine code, {outcomes['no C']} that do not compile")
    print("by", dict(collections.Counter(Path(row["by"]).name for row in results if row["by"]).most_common()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("n", type=int, help="how many mutants")
    parser.add_argument("tests", nargs="+", help="test files, as tests/test_method.py")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (1)")
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # mutants crash often

    tests = refresh()
    plain = build()
    if not plain:
        raise SystemExit("the core does not compile without a mutant")
    sources = {
        str(path.relative_to(TREE)): path.read_text() for path in sorted((TREE / "csrc").rglob("*.[ch]"))
    }
    found = {mutant.diff(text): mutant for file, text in sources.items() for mutant in mutants_of(file, text)}
    order = sorted(found, key=lambda name: hashlib.sha256(f"{asked.seed} {name}".encode()).digest())
    chosen = order[: asked.n]

    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    known = {row["diff"]: row for row in rows}
    kills = collections.Counter(row["by"] for row in known.values())
    seconds = measured([*C_TESTS, *asked.tests])

    for number, name in enumerate(chosen, 1):
        row = known.get(name)
        if row and (row["outcome"] != "survived" or row["tests"] == tests):
            continue
        mutant = found[name]
        start = time.monotonic()
        file, text = TREE / mutant.file, sources[mutant.file]
        try:
            file.write_text(mutant.apply(text))
            changed = build()
            outcome, by, told = "same code" if changed else "no C", "", ""
            if changed and changed != plain:
                outcome, by, told = judged(seconds, kills)
        finally:
            file.write_text(text)
        kills[by] += 1
        row = {"diff": name, "kind": mutant.kind, "outcome": outcome, "by": by, "told": told}
        row |= {"seconds": round(time.monotonic() - start, 1), "tests": tests}
        known[name] = row
        with RESULTS.open("a") as results:
            results.write(json.dumps(row) + "\n")
        print(f"{number} of {len(chosen)}: {outcome} {by} ({row['seconds']} s), {mutant.file}", flush=True)
    report([known[name] for name in chosen])


if __name__ == "__main__":
    main()
