"""Runs that grow: more settings, items and lengths in one folder, folders merged, times kept apart."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import untimed
from toys import Paper

import lazyllm
from lazyllm import Pruning, longbench
from lazyllm.commands.main import main
from lazyllm.evaluation.report import environments_table, scores_table
from lazyllm.evaluation.results import ITEMS, MANIFEST, Key, joined, new_manifest, opened_run, read_manifest, read_rows
from lazyllm.evaluation.summary import NO_SPEED
from lazyllm.methods.parsing import as_method

pytestmark = pytest.mark.usefixtures("no_pictures")
QUIET: dict[str, Any] = {"warm_ups": 0, "progress": False, "wrapper": "none"}
FIRST, SECOND = "{1: 0.5}", "{2: 0.5}"
Row = dict[str, Any]
CELL = {"setting": "a", "dataset": "b", "item": "c", "content": "1"}


@pytest.fixture(scope="module")
def two_threads(folder: Path) -> lazyllm.LLM:
    return lazyllm.load(folder, device="cpu", threads=2)


def ruler(llm: lazyllm.LLM, out: Path, pruning: Any = (None, {1: 0.5}), **options: Any) -> longbench.Run:
    asked = {"tasks": ["niah_single_1"], "lengths": [560], "count": 2, **QUIET, **options}
    return longbench.run_ruler(llm, pruning, out=out, **asked)


def sweep(llm: lazyllm.LLM, out: Path, space: Any, **options: Any) -> lazyllm.Sweep:
    asked = {"datasets": ["niah_single_1"], "max_length": 560, "limit": 2, "tokens": 2, **QUIET, **options}
    return lazyllm.sweep(llm, space, out=out, **asked)


def keys(rows: list[Row]) -> list[Key]:
    return [*map(Key.of, rows)]


# ---- one folder that grows -----------------------------------------------------------------------


def test_another_setting_runs_that_one_alone(llm: lazyllm.LLM, tmp_path: Path) -> None:
    before = ruler(llm, tmp_path).rows
    made = ruler(llm, tmp_path, (None, {1: 0.5}, {2: 0.5}))
    assert made.rows[:4] == before
    assert keys(made.rows[4:]) == [(SECOND, *key[1:]) for key in keys(before[::2])]
    assert len(made.manifest["environments"]) == 1
    assert made.summary.speed(SECOND, "ttft") != NO_SPEED
    alone = ruler(llm, tmp_path, [{3: 0.5}])
    assert {row["setting"] for row in alone.rows[6:]} == {"{3: 0.5}"}
    assert list(alone.manifest["conditions"]["settings"]) == alone.summary.settings


def test_settings_have_names(llm: lazyllm.LLM, tmp_path: Path) -> None:
    named = {"dense": None, "ours": {1: 0.5}, "theirs": "random:keep=0.5"}
    made = ruler(llm, tmp_path / "run", named)
    assert made.summary.settings == list(made.scores()) == list(named)
    assert set(made.to_frame()["setting"]) == set(named)
    assert "| ours | " in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"settings, ours is .*, not "):
        ruler(llm, tmp_path / "run", {"ours": {2: 0.5}})
    assert ruler(llm, tmp_path / "run", named).rows == made.rows
    swept = sweep(llm, tmp_path / "sweep", {"ours": {1: 0.5}, "theirs": "random:keep=0.5"})
    again = lazyllm.Sweep.read(tmp_path / "sweep")
    wanted = [(name, as_method(setting)) for name, setting in named.items()]
    assert [(point.setting, point.pruning) for point in again] == wanted
    assert again["ours"].pruning == swept["ours"].pruning == Pruning({1: 0.5})
    for wrong in ({"dense": {1: 0.5}}, {"base": None}):
        for call in (ruler, sweep):
            with pytest.raises(ValueError, match="dense alone is named 'dense'"):
                call(llm, tmp_path / "new", wrong)
    assert ruler(llm, tmp_path / "one", {"1": 0.5}).summary.settings == ["{1: 0.5}"]


def test_items_lengths_and_tasks_are_added(llm: lazyllm.LLM, tmp_path: Path) -> None:
    before = ruler(llm, tmp_path / "run").rows
    ruler(llm, tmp_path / "run", count=3)
    ruler(llm, tmp_path / "run", lengths=[580, 560], tasks=["niah_single_1", "niah_single_2"], count=1)
    made = ruler(llm, tmp_path / "run", count=1, seed=7)
    assert made.rows[:4] == before
    sizes = {"niah_single_1@560": 4, "niah_single_1@580": 1, "niah_single_2@560": 1, "niah_single_2@580": 1}
    assert made.summary.items == sizes
    assert len(made.rows) == 2 * sum(sizes.values()) == len(set(keys(made.rows)))
    assert [selection["count"] for selection in made.manifest["selections"]] == [2, 3, 1, 1]
    ruler(llm, tmp_path / "new", count=3)
    new = ruler(llm, tmp_path / "new", count=1, seed=7)
    same = [row for row in made.rows if row["dataset"] == "niah_single_1@560"]
    assert sorted(untimed(same), key=Key.of) == sorted(untimed(new.rows), key=Key.of)
    text = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert '- items of a call: {"lengths": [560], "count": 3, "seed": 0, "tasks": ["niah_single_1"]}' in text


def test_a_setting_with_fewer_items_is_told(llm: lazyllm.LLM, tmp_path: Path, no_pictures: Callable[[], None]) -> None:
    ruler(llm, tmp_path)
    made = ruler(llm, tmp_path, [{2: 0.5}], count=1)
    assert ["items", "2", "2", "1"] in scores_table(made.summary).rows
    assert "items" not in [row[0] for row in scores_table(ruler(llm, tmp_path, [{2: 0.5}]).summary).rows]
    no_pictures()
    ruler(llm, tmp_path, [{2: 0.5}], tasks=["niah_single_2"])
    assert (tmp_path / "scores.png").exists()


def test_another_item_of_the_same_name_is_refused(llm: lazyllm.LLM, tmp_path: Path) -> None:
    def niah(seed: int) -> None:
        longbench.run_niah(llm, out=tmp_path, lengths=[560], depths=[0, 50], seed=seed, **QUIET)

    niah(0)
    before = (tmp_path / ITEMS).read_bytes(), (tmp_path / MANIFEST).read_bytes()
    with pytest.raises(ValueError, match=r"an item 0/0 of niah_single_1@560 whose content is not"):
        niah(1)
    assert ((tmp_path / ITEMS).read_bytes(), (tmp_path / MANIFEST).read_bytes()) == before


def test_a_sweep_grows(llm: lazyllm.LLM, tmp_path: Path) -> None:
    before = sweep(llm, tmp_path, [{1: 0.5}])
    grown = sweep(llm, tmp_path, [{2: 0.5}])
    assert [point.setting for point in grown] == ["dense", FIRST, SECOND]
    assert [point.pruning for point in grown] == [point.pruning for point in lazyllm.Sweep.read(tmp_path)]
    assert grown.rows[:4] == before.rows
    assert len(grown.rows) == 6
    sweep(llm, tmp_path, [Paper({1: 0.5})])
    with pytest.raises(ValueError, match="is code; give an instance"):
        sweep(llm, tmp_path, [{3: 0.5}])
    assert len(sweep(llm, tmp_path, [Paper({1: 0.5}), {3: 0.5}])) == 5

    class Other(lazyllm.Policy):
        def score(self, view: Any) -> Any:
            return view.attention(2).mean(axis=(0, 1))

    Other.__name__ = "Paper"
    with pytest.raises(ValueError, match=r"Paper\(.*: source sha256"):
        sweep(llm, tmp_path, [Other({1: 0.5}), {3: 0.5}])


def test_times_of_other_threads_are_kept_apart(llm: lazyllm.LLM, two_threads: lazyllm.LLM, tmp_path: Path) -> None:
    ruler(llm, tmp_path)
    made = ruler(two_threads, tmp_path, (None, {1: 0.5}, {2: 0.5}))
    first, second = made.summary.environments
    assert [made.manifest["environments"][name]["threads"] for name in (first, second)] == [1, 2]
    assert [row["environment"] for row in made.rows] == [first] * 4 + [second] * 2
    assert made.summary.speed(FIRST, "ttft") != NO_SPEED
    assert made.summary.speed(SECOND, "ttft") == NO_SPEED
    assert made.scores()[SECOND] == ruler(llm, tmp_path / "one", [{2: 0.5}]).scores()[SECOND]
    where = environments_table(made.summary, made.manifest["environments"])
    assert [line[:2] for line in where.rows] == [[first, "4"], [second, "2"]]
    assert where.markdown() in (tmp_path / "report.md").read_text(encoding="utf-8")


# ---- folders merged ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(llm: lazyllm.LLM, two_threads: lazyllm.LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The second has other threads, the first's items and one more, and one more setting."""
    here, there = (tmp_path_factory.mktemp(name) for name in ("here", "there"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib", None)
        ruler(llm, here)
        ruler(two_threads, there, (None, {1: 0.5}, {2: 0.5}), count=3)
    return here, there


def test_merged_folders_are_one_run(folders: tuple[Path, Path], llm: lazyllm.LLM, tmp_path: Path) -> None:
    made = longbench.Run(longbench.merge(folders, tmp_path / "both"))
    assert len(made.rows) == 4 + 9
    assert len(made.summary.rows) == 9
    first, second = made.summary.environments
    assert [made.summary.n_timed(name) for name in (first, second)] == [9, 4]
    assert made.scores() == longbench.Run(folders[1]).scores()
    assert [row["timing"] for row in made.rows if row["environment"] == second] == [
        row["timing"] for row in longbench.Run(folders[0]).rows
    ]
    before = (tmp_path / "both" / ITEMS).read_bytes()
    longbench.merge([*folders, folders[0]], tmp_path / "both")
    assert (tmp_path / "both" / ITEMS).read_bytes() == before
    grown = ruler(llm, tmp_path / "both", [{3: 0.5}], count=1)
    assert len(grown.rows) == 4 + 9 + 1


def altered(folder: Path, out: Path, fields: Row, without: tuple[str, ...] = ()) -> Path:
    shutil.copytree(folder, out)
    rows = [{name: row[name] for name in row if name not in without} | fields for row in read_rows(out)]
    (out / ITEMS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return out


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prediction": "x"}, 'under dense has the prediction .* in .* and "x" in'),
        ({"score": 1.5}, r"item niah_.*seed0-0 of niah_.* has the score 0\.5 in .* and 1\.5 in"),
        ({"score": 0.5 + 1e-9}, None),
        ({"content": "x"}, r"an item niah_.* of niah_.* whose content is not that"),
        ({"timing": {"ttft": 1.0, "seconds": 1.0}}, None),
        ({"used": [1.0, [2.0 + 1e-12, "a"]]}, None),
        ({"used": [1.0]}, r"has the used \[1.0, \[2.0, .* and \[1.0\] in"),
        ({"used": [1.1, [2.0, "a"]]}, r"has the used .* and \[1.1, .* in"),
    ],
)
def test_doubles_that_disagree_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, fields: Row, words: str | None
) -> None:
    first = altered(folders[0], tmp_path / "first", {"used": [1.0, [2.0, "a"]], "score": 0.5})
    other = altered(first, tmp_path / "other", fields)
    if words is None:
        assert len(read_rows(longbench.merge([first, other], tmp_path / "both"))) == 4
        return
    with pytest.raises(ValueError, match=words):
        longbench.merge([first, other], tmp_path / "both")
    assert not read_rows(tmp_path / "both")


def test_a_result_replaces_an_error(folders: tuple[Path, Path], tmp_path: Path) -> None:
    failed = altered(folders[0], tmp_path / "failed", {"error": "MemoryError: full"}, ("score", "prediction"))
    both = longbench.Run(longbench.merge([failed, failed], tmp_path / "both"))
    assert len(both.summary.failed) == 4
    mended = longbench.Run(longbench.merge([folders[0]], tmp_path / "both"))
    assert not mended.summary.failed
    assert len(mended.rows) == 4


def test_runs_under_other_conditions_are_not_merged(
    folders: tuple[Path, Path], llm: lazyllm.LLM, tmp_path: Path
) -> None:
    other = ruler(llm, tmp_path / "other", wrapper="template").folder
    words = rf'{folders[0]} .* than {other}: wrapper is "none", not "template"'
    with pytest.raises(ValueError, match=words):
        longbench.merge([folders[0], other], tmp_path / "both")
    assert not (tmp_path / "both").exists()
    with pytest.raises(FileNotFoundError, match="holds no run"):
        longbench.merge([folders[0], tmp_path], tmp_path / "both")
    with pytest.raises(ValueError, match="no folder to merge"):
        longbench.merge([], tmp_path / "both")


def test_mappings_among_conditions_grow_and_must_agree() -> None:
    first = new_manifest("m", {"packages": {"numpy": "1"}, "tasks": "x"}, {"limit": 1})
    second = new_manifest("n", {"packages": {"jieba": "2", "numpy": "1"}, "tasks": "x"}, {"limit": 2})
    made = joined(first, second, "a", "b")
    assert made["conditions"] == {"packages": {"numpy": "1", "jieba": "2"}, "tasks": "x"}
    assert made["selections"] == [{"limit": 1}, {"limit": 2}]
    assert made["model"] == "m"
    other = new_manifest("m", {"packages": {"numpy": "2"}, "more": 1}, {})
    with pytest.raises(ValueError, match='packages, numpy is "1", not "2"; tasks is "x", not null; more'):
        joined(made, other, "a", "b")


def test_the_command_reports_one_folder_and_several(
    folders: tuple[Path, Path],
    llm: lazyllm.LLM,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_pictures: Callable[[], None],
) -> None:
    here, there = map(str, folders)
    assert main(["report", here, there, "--out", str(tmp_path / "both")]) == 0
    assert "13 results" not in (out := capsys.readouterr().out)
    assert "9 results" in out
    assert f"wrote {tmp_path / 'both'}" in out
    assert {"report.md", "speed.csv"} <= {path.name for path in (tmp_path / "both").iterdir()}
    (folders[0] / "report.md").unlink()
    assert main(["report", here]) == 0
    assert (folders[0] / "report.md").exists()
    assert main(["report", here, there]) == 2
    assert "several folders need --out" in capsys.readouterr().err
    for name, setting in (("one", {1: 0.5}), ("two", {2: 0.5})):
        sweep(llm, tmp_path / name, [setting])
    sweeps = [str(tmp_path / name) for name in ("one", "two")]
    no_pictures()
    assert main(["report", *sweeps, "--out", str(tmp_path / "sweeps")]) == 0
    assert [point.setting for point in lazyllm.Sweep.read(tmp_path / "sweeps")] == ["dense", FIRST, SECOND]
    assert (tmp_path / "sweeps" / "pareto.png").exists()


def test_rows_stand_in_the_order_of_the_plan_and_their_environments_in_the_manifest(tmp_path: Path) -> None:
    with opened_run(tmp_path, new_manifest("m", {}, {})) as folder:
        for item in "0312":
            row = folder.append({**CELL, "item": item}, {"threads": 3})
            assert read_manifest(tmp_path)["environments"] == {row["environment"]: {"threads": 3}}
        folder.sort([Key("a", "b", item) for item in "123"])
        folder.append({**CELL, "item": "4"}, {})
    assert [row["item"] for row in read_rows(tmp_path)] == ["0", "1", "2", "3", "4"]
    (tmp_path / MANIFEST).write_text(json.dumps({**new_manifest("m", {}, {}), "format": 3}))
    with pytest.raises(ValueError, match="is no manifest of format 2; its format is 3"):
        read_manifest(tmp_path)


def test_callbacks_get_each_new_row_when_it_is_on_disk(llm: lazyllm.LLM, tmp_path: Path) -> None:
    seen: list[tuple[Row, int]] = []
    ruler(llm, tmp_path, count=1)
    made = ruler(llm, tmp_path, on_row=lambda row: seen.append((row, len(read_rows(tmp_path)))))
    assert seen == [(made.rows[2], 3), (made.rows[3], 4)]

    def stop(row: Row) -> None:
        raise KeyError("full")

    with pytest.raises(KeyError, match="full"):
        ruler(llm, tmp_path, [{2: 0.5}], on_row=stop)
    assert len(read_rows(tmp_path)) == 5
