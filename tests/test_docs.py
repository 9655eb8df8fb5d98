"""README and docs: every command line parses with settings that exist, every block of Python compiles, and
links lead somewhere."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import lazyllm
from lazyllm.commands.main import parser
from lazyllm.methods import as_method
from lazyllm.support.json_text import parse_json
from lazyllm.sweeps.space import combined

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in FENCED.findall(page.read_text(encoding="utf-8")) if name == language]


def commands(page: Path) -> list[list[str]]:
    """The words of each `lazyllm …` line; variables of the block are filled in."""
    found = []
    for block in blocks(page, "sh"):
        lines = block.replace("\\\n", " ").splitlines()
        set_here = (re.match(r"(\w+)='(.*)'$", line) for line in lines)
        variables = {match[1]: match[2] for match in set_here if match}
        for line in lines:
            for name, value in variables.items():
                line = line.replace(f"${name}", value.replace('"', '\\"'))
            if line.startswith("lazyllm ") and "…" not in line:
                found.append(shlex.split(line, comments=True)[1:])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse_and_their_settings_exist(page: Path) -> None:
    for words in commands(page):
        if words[0] == "lm-eval":  # the harness' own options
            continue
        args = vars(parser().parse_args(words))
        settings = args.get("pruning", [])
        for setting in settings if isinstance(settings, list) else [settings]:
            if not str(setting).endswith(".json"):  # a preset's file
                as_method(setting)
        if "space" in args:
            assert combined(parse_json(args["space"], "--space", strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_compiles_and_names_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        used = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Attribute)]
        names = [node.attr for node in used if ast.unparse(node.value) == "lazyllm"]
        assert all(hasattr(lazyllm, name) for name in names), names


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    heads = [re.sub(r"[^\w\- ]", "", head.strip().lower()) for head in re.findall(r"^#+ (.*)$", text, re.M)]
    return {head.replace(" ", "-") for head in heads} | set(re.findall(r'id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text(encoding="utf-8"))):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target
