"""Changes the C core in one place at a time and looks whether the tests notice: `make mutants`.

Each mutant is one random change of csrc/: an operator, a comparison, a number, a statement left out, a
condition turned round. It is built in a copy of the tree; then the C tests and each test file run, those
first that killed most, until one fails. tests/mutants.jsonl has a line for each mutant, and a run that is
started again goes on from there; what survived is tried again after a change of the tests.
"""

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
from pathlib import Path
from typing import Any, NamedTuple

TREE = Path("build/mutants/tree").resolve()
RESULTS = Path("tests/mutants.jsonl")
CORE = TREE / "build/core_mutants/lib"
C_TESTS = ["build/test_ops_mutants", "build/test_system_mutants"]
SECONDS = 900  # a test program takes fewer, and a mutant may never end

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


class Mutant(NamedTuple):
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


def failure(test: str) -> str | None:
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
        output, _ = child.communicate(timeout=SECONDS)
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


def report(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["outcome"] == "survived":
            print(f"survived: {row['kind']}, {row['diff']}\n")
    print(*collections.Counter(row["by"] for row in rows if row["by"]).most_common(), sep="\n")
    outcomes = collections.Counter(row["outcome"] for row in rows)
    tried = outcomes["killed"] + outcomes["survived"]
    print(f"killed {outcomes['killed']} of {tried} ({outcomes['killed'] / max(tried, 1):.0%})")
    print(f"left out: {outcomes['same code']} of equal machine code, {outcomes['no C']} that do not compile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int, help="how many mutants")
    parser.add_argument("tests", nargs="+", help="test files, as tests/test_method.py")
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # mutants crash often

    tests = refresh()
    plain = build()
    programs = [*C_TESTS, *asked.tests]
    if plain is None:
        raise SystemExit("the core does not compile without a mutant")
    for program in programs:
        if words := failure(program):
            raise SystemExit(f"{program} fails without a mutant: {words}")
    sources = {str(path.relative_to(TREE)): path.read_text() for path in (TREE / "csrc").rglob("*.[ch]")}
    found = {mutant.diff(text): mutant for file, text in sources.items() for mutant in mutants_of(file, text)}
    chosen = sorted(found, key=lambda name: hashlib.sha256(f"1 {name}".encode()).digest())[: asked.n]

    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    known = {row["diff"]: row for row in rows}
    kills = collections.Counter(row["by"] for row in known.values())

    for number, name in enumerate(chosen, 1):
        row = known.get(name)
        if row and (row["outcome"] != "survived" or row["tests"] == tests):
            continue
        mutant = found[name]
        file, text = TREE / mutant.file, sources[mutant.file]
        try:
            file.write_text(mutant.apply(text))
            changed = build()
            outcome, by, message = "same code" if changed else "no C", "", ""
            if changed and changed != plain:
                outcome = "survived"
                for test in sorted(programs, key=kills.__getitem__, reverse=True):
                    if words := failure(test):
                        outcome, by, message = "killed", test, words
                        break
        finally:
            file.write_text(text)
        kills[by] += 1
        known[name] = {"diff": name, "kind": mutant.kind, "outcome": outcome, "by": by, "message": message}
        known[name]["tests"] = tests
        with RESULTS.open("a") as results:
            results.write(json.dumps(known[name]) + "\n")
        print(f"{number} of {len(chosen)}: {outcome} {by}, {mutant.file}", flush=True)
    report([known[name] for name in chosen])


if __name__ == "__main__":
    main()
