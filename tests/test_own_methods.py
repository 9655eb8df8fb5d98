"""Methods of users: classes in Python, and those that installed packages offer by entry points."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from folders import IDS

import lazyllm
from lazyllm import LLM, Drop, Method, parse_method
from lazyllm.methods.parsing import as_method

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(__file__).parents[1]
PAGE = ROOT.joinpath("docs", "policies.md").read_text()
TAIL = PAGE.split("```python\n")[2].split("```")[0].replace("{9: 0.5}", "{2: 0.5}")
LOUDEST = """
class Loudest(lazyllm.Policy):
    name = "loudest"

    def score(self, view):
        return view.attention(4).mean(axis=1).max(axis=0)
"""
SHORTENED = """
@dataclass(frozen=True)
class Shortened(lazyllm.Method):
    name = "shortened"
    compresses = True
    share: float = 0.5

    def compress(self, llm, text):
        return text[: math.ceil(self.share * len(text))]

    def core(self):
        return lazyllm.Pruning({2: 0.5}).core()
"""


def install(site: Path, package: str, code: str, points: dict[str, str]) -> None:
    """Writes a module and the metadata of its installation, as pip leaves them in site-packages."""
    site.mkdir(exist_ok=True)
    (site / f"{package}.py").write_text(code)
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[lazyllm.methods]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like site-packages, with a package of three methods."""
    made = tmp_path / "site"
    points = {"tail": "tails:Tail", "loudest": "tails:Loudest", "shortened": "tails:Shortened"}
    install(made, "tails", TAIL + LOUDEST + SHORTENED, points)
    monkeypatch.syspath_prepend(made)
    monkeypatch.delitem(sys.modules, "tails", raising=False)
    return made


def settings(name: str) -> Any:
    return getattr(import_module("tails"), name)


def test_a_method_as_it_stands_is_dense(llm: LLM) -> None:
    dense, plain = (llm.generate(IDS, method, max_new_tokens=4) for method in (None, Method()))
    assert plain.token_ids == dense.token_ids
    assert plain.computed == 1.0


def test_the_method_of_the_docs_shortens_and_prunes(llm: LLM, site: Path) -> None:
    tail = settings("Tail")(0.5)
    assert str(tail) == "Tail(keep=0.5)"
    want = llm.generate(IDS[-25:], {2: 0.5}, max_new_tokens=4)
    out = llm.generate(IDS, tail, max_new_tokens=4)
    assert (out.token_ids, out.prompt_ids) == (want.token_ids, IDS[-25:])
    session = llm.session(tail)
    assert session.ask("The sea was calm.", max_new_tokens=2).n_given == 17
    assert session.ask("Was it?", max_new_tokens=2).n_given == 7
    with pytest.raises(ValueError, match=r"surprisal needs a session without pruning, not one with Tail"):
        session.surprisal(IDS)


OPTIONS: dict[str, Any] = {"datasets": ["niah_single_1"], "max_length": 560, "limit": 1, "wrapper": "none"}
OPTIONS |= {"warm_ups": 0, "progress": False}


def test_runs_and_sweeps_take_any_method(llm: LLM, site: Path, tmp_path: Path) -> None:
    """By instance and by text; a run does not go on under a method of another source."""
    tail = settings("Tail")(0.5)
    run = lazyllm.longbench.run(llm, [None, "tail:keep=0.5"], out=tmp_path / "run", **OPTIONS)
    swept = lazyllm.sweep(llm, [tail], measure="both", out=tmp_path / "sweep", **OPTIONS)
    for result in (run, swept):
        (row,) = (row for row in result.rows if row["setting"] == "Tail(keep=0.5)")
        assert "error" not in row
        assert row["prompt_tokens"] > row["in_play"]["0"] >= row["prompt_tokens"] / 2
        assert row["in_play"]["3"] < row["in_play"]["0"]

    site.joinpath("tails.py").write_text(TAIL.replace("[-self.kept", "[: self.kept") + LOUDEST + SHORTENED)
    del sys.modules["tails"]
    other = settings("Tail")(0.5)
    assert str(other) == str(tail)
    with pytest.raises(ValueError, match=r"Tail\(keep=0.5\): source sha256"):
        lazyllm.longbench.run(llm, [None, other], out=tmp_path / "run", **OPTIONS)


def test_what_compresses_may_prune_too(llm: LLM, site: Path, tmp_path: Path) -> None:
    text = "The sea was calm. " * 4
    method = settings("Shortened")()
    out = llm.generate(text, method, max_new_tokens=2)
    assert len(out.prompt_ids) == out.passes["in_play"][0] == len(text) / 2
    assert out.passes["in_play"][3] == len(text) / 4
    run = lazyllm.longbench.run(llm, method, out=tmp_path, **OPTIONS)
    (row,) = run.rows
    assert row["in_play"]["3"] < 0.6 * row["in_play"]["0"] < 0.6 * row["prompt_tokens"]


def test_entry_points_give_names(site: Path) -> None:
    tail, loudest = settings("Tail"), settings("Loudest")
    for form in "tail:keep=0.5", '{"method": "tail", "keep": 0.5}', tail(0.5).to_json():
        assert parse_method(form) == tail(0.5)
    policy = parse_method('{"method": "loudest", "stages": {"2": {"drop": 0.5}}, "sink": 4}')
    assert policy == loudest({2: Drop(0.5)}, sink=4)
    for text, words in [
        ("tail", "tail: missing a required argument: 'keep'"),
        ("tail:kep=1", "tail: got an unexpected keyword argument 'kep'; it takes keep"),
        ('{"method": "loudest"}', "loudest: missing a required argument: 'stages'"),
        ('{"method": "loudest", "stages": {"2": 0.5}, "queries": 4}', "keyword argument 'queries'"),
        ('{"method": "magic"}', "one of compress, random, .*expected, speedup, loudest, shortened, tail"),
        ("magic:keep=1", "pruning is 'magic:keep=1'; it must be a speedup such as 2x, dense"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            parse_method(text)


BROKEN = {
    "missing": ("nowhere:Tail", ValueError, "\\(nowhere:Tail of others\\) cannot be loaded: ModuleNot"),
    "nothing": ("others:Tail", ValueError, "\\(others:Tail of others\\) cannot be loaded: Attribute"),
    "failing": ("failing:Tail", ValueError, "\\(failing:Tail of others\\) cannot be loaded: ZeroDiv"),
    "number": ("others:number", TypeError, "must be a lazyllm.Method with name = 'number', not 5"),
    "renamed": ("tails:Tail", TypeError, "with name = 'renamed', not .*Tail"),
    "tail": ("others:number", ValueError, "the method 'tail' is in .*others.*; uninstall"),
    "random": ("tails:Tail", ValueError, "'random' is in tails:Tail of others, lazyllm itself"),
}


def test_a_broken_entry_point_is_an_error_only_where_it_is_asked_for(site: Path) -> None:
    install(site, "others", "number = 5\n", {name: value for name, (value, *_) in BROKEN.items()})
    (site / "failing.py").write_text("1 / 0\n")
    for name, (_, kind, words) in BROKEN.items():
        with pytest.raises(kind, match=words):
            parse_method(f"{name}:keep=0.5")
        with pytest.raises(kind, match=words):
            as_method({"method": name, "keep": 0.5})
    assert parse_method("loudest:stages=null") == settings("Loudest")(None)
