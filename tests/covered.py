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


def reasons() -> dict[str, list[tuple[str, str]]]:
    """By file, parts of lines (all lines, where a file stands alone), each with its reason."""
    found: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    reason = ""
    for line in REASONS.read_text().splitlines()[1:]:
        if line.startswith("  "):
            file, _, part = line.strip().partition(": ")
            found[file].append((part, reason))
        else:
            reason = line
    return found


def report(language: str, files: dict[str, Lines]) -> bool:
    """Prints; True if enough was reached."""
    reached = total = unexplained = 0
    known = reasons()
    for file, lines in sorted(files.items()):
        here = sum(lines.values())
        reached, total = reached + here, total + len(lines)
        if here == len(lines):
            continue
        print(f"\n{file}: {here} of {len(lines)} lines ({here / len(lines):.1%})")
        text = Path(file).read_text().splitlines()
        for number in sorted(number for number, was in lines.items() if not was):
            line = text[number - 1]
            why = next((reason for part, reason in known[file] if part in line), "")
            unexplained += not why
            print(f"  {number:4} {line}{why and f'   -- {why}'}")
    share = 100 * reached / total
    least = f"at least {LEAST[language]} %; {unexplained} that {REASONS} does not explain"
    print(f"\n{language}: {reached} of {total} lines ({share:.2f} %; {least})\n")
    return share >= LEAST[language]


def main() -> int:
    c, idle = c_lines()
    good = [report("Python", python_lines()), report("C", c)]
    for file in idle:
        print(f"{file}: not run, this machine lacks its instructions")
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
