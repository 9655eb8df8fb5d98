"""The lines of C and Python that the tests reached, and by file those that they did not: `make coverage`.

Fails below 95 % of C or 92 % of Python. Lines that tests/unreached.txt explains are listed with its reasons,
and count as not reached. Kernels of instruction sets that this machine lacks are named and left out.
"""

from __future__ import annotations

import collections
import json
import re
import subprocess
from pathlib import Path

LEAST = {"C": 95.0, "Python": 92.0}
OBJECTS = Path("build/core_coverage")
PYTHON = Path("build/coverage/python.json")
REASONS = Path("tests/unreached.txt")
KERNELS = re.compile(r"csrc/cpu/(kernels|products)_\w+\.c")

Lines = dict[int, bool]  # line number: whether any test reached it


def c_lines() -> tuple[dict[str, Lines], list[str]]:
    """By file, a header once for all that include it; and the files of kernels of which nothing ran."""
    found: dict[str, Lines] = collections.defaultdict(dict)
    idle = []
    for notes in sorted(OBJECTS.rglob("*.gcno")):
        command = ["gcov", "--json-format", "--stdout", str(notes)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        here = {
            one["file"]: one["lines"] for one in json.loads(told)["files"] if one["file"].startswith("csrc/")
        }
        source = f"csrc/{notes.relative_to(OBJECTS).with_suffix('.c')}"
        if KERNELS.fullmatch(source) and not any(line["count"] for lines in here.values() for line in lines):
            idle.append(source)
            continue
        for file, lines in here.items():
            for line in lines:
                number = line["line_number"]
                found[file][number] = found[file].get(number, False) or line["count"] > 0
    return found, idle


def python_lines() -> dict[str, Lines]:
    """By file; the tests run a copy of the package, and some programs that they start the package itself."""
    found: dict[str, Lines] = collections.defaultdict(dict)
    for path, one in json.loads(PYTHON.read_text())["files"].items():
        lines = found[re.sub(r"^(.*/)?lazyllm/", "lazyllm/", path)]
        lines |= dict.fromkeys(set(one["missing_lines"]) - lines.keys(), False)
        lines |= dict.fromkeys(one["executed_lines"], True)
    return found


def reasons() -> list[tuple[str, str, str]]:
    """File, part of a line, reason: a line of the form `file: part`, and the reason in the next."""
    text = REASONS.read_text()
    return [(m[1], m[2], m[3]) for m in re.finditer(r"^(\S+): (.*)\n +(.*)$", text, re.M)]


def report(language: str, files: dict[str, Lines]) -> bool:
    """Prints; True if enough was reached."""
    reached = total = 0
    known = [one for one in reasons() if one[0] in files]
    unused = set(known)
    for file, lines in sorted(files.items()):
        here = sum(lines.values())
        reached, total = reached + here, total + len(lines)
        if here == len(lines):
            continue
        print(f"\n{file}: {here} of {len(lines)} lines ({here / len(lines):.1%})")
        text = Path(file).read_text().splitlines()
        for number, was in sorted(lines.items()):
            if not was:
                line = text[number - 1]
                why = next((one for one in known if one[0] == file and one[1] in line), None)
                unused.discard(why)
                print(f"  {number:4} {line}{f'   -- {why[2]}' if why else ''}")
    for file, part, _ in sorted(unused):
        print(f"\n{REASONS} explains a line that is reached or gone: {file}: {part}")
    share = 100 * reached / total
    print(f"\n{language}: {reached} of {total} lines ({share:.2f} %; at least {LEAST[language]} %)\n")
    return share >= LEAST[language]


def main() -> int:
    c, idle = c_lines()
    good = [report("Python", python_lines()), report("C", c)]
    for file in idle:
        print(f"{file}: not run, this machine lacks its instructions")
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
