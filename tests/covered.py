"""The lines of C and Python that the tests reached, and by file those that they did not: `make coverage`.

Fails below 95 % of C or 92 % of Python. Lines that tests/unreached.txt explains are listed with its reasons,
and count as not reached. Kernels of instruction sets that this machine lacks are named and left out.
"""

import collections
import json
import re
import subprocess
from pathlib import Path

OBJECTS = Path("build/core_coverage")
PYTHON = Path("build/coverage/python.json")
REASONS = Path("tests/unreached.txt")
KERNELS = re.compile(r"csrc/cpu/(kernels|products)_\w+\.c")

Files = dict[str, dict[int, bool]]  # by file and line number: whether any test reached it


def c_lines() -> Files:
    """A header once for all that include it."""
    found: Files = collections.defaultdict(dict)
    for notes in sorted(OBJECTS.rglob("*.gcno")):
        command = ["gcov", "--json-format", "--stdout", str(notes)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows = [
            (file["file"], line["line_number"], line["count"] > 0)
            for file in json.loads(output)["files"]
            for line in file["lines"]
            if file["file"].startswith("csrc/")
        ]
        source = f"csrc/{notes.relative_to(OBJECTS).with_suffix('.c')}"
        if KERNELS.fullmatch(source) and not any(reached for *_, reached in rows):
            print(f"{source}: not run, this machine lacks its instructions")
            continue
        for file, number, reached in rows:
            found[file][number] = found[file].get(number, False) or reached
    return found


def python_lines() -> Files:
    """The tests run a copy of the package, and some programs that they start the package itself."""
    found: Files = collections.defaultdict(dict)
    for path, file in json.loads(PYTHON.read_text())["files"].items():
        lines = found[re.sub(r"^(.*/)?lazyllm/", "lazyllm/", path)]
        lines |= dict.fromkeys(set(file["missing_lines"]) - lines.keys(), False)
        lines |= dict.fromkeys(file["executed_lines"], True)
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


def enough(language: str, files: Files, least: float) -> bool:
    """Prints what was not reached; True if enough was."""
    known, unexplained = reasons(), 0
    for file, lines in sorted(files.items()):
        missing = [number for number, reached in sorted(lines.items()) if not reached]
        if missing:
            print(f"\n{file}: {len(lines) - len(missing)} of {len(lines)} lines")
        text = Path(file).read_text().splitlines()
        for number in missing:
            line = text[number - 1]
            reason = next((reason for part, reason in known[file] if part in line), "")
            unexplained += not reason
            print(f"  {number:4} {line}{reason and f'   -- {reason}'}")
    reached = [reached for lines in files.values() for reached in lines.values()]
    share = 100 * sum(reached) / len(reached)
    print(f"\n{language}: {sum(reached)} of {len(reached)} lines ({share:.2f} %; at least {least} %)")
    print(f"{unexplained} that {REASONS} does not explain\n")
    return share >= least


if __name__ == "__main__":
    results = [enough("Python", python_lines(), 92.0), enough("C", c_lines(), 95.0)]
    raise SystemExit(not all(results))
