"""Traces and the picture made of them."""

import math
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from folders import SHAPE, STAGES

from lazyllm import LLM, Generation, Pruning, Scoring, Trace
from lazyllm.pictures.heat_map import SHADES, STYLE

TEXT = "The <b>sea</b> & the wind, the wind & the sea: né 😀.\nAnd a second line of it."


@pytest.fixture(scope="module")
def made(llm: LLM) -> Generation:
    return llm.generate(TEXT, pruning=STAGES, max_new_tokens=6, trace=True)


@pytest.fixture(scope="module")
def trace(made: Generation) -> Trace:
    return made.trace


@pytest.fixture(scope="module")
def html(trace: Trace) -> str:
    return trace.heatmap()._repr_html_()


def test_kept_positions_are_the_best_scoring_ones(trace: Trace, made: Generation) -> None:
    n = len(made.prompt_ids)
    assert [passed.depths is None for passed in trace.passes] == [False] + [True] * 5
    assert [stage[:2] for stage in trace.stages] == [(i, layer) for i in range(6) for layer in (1, 3)]
    for stage in trace.stages:
        keep = math.ceil(dict(STAGES.stages)[stage.layer] * n)
        assert np.isin(stage.kept, stage.in_play).all()
        assert stage.scores.shape == stage.in_play.shape
        assert (stage.kept < n).sum() == keep
        assert stage.in_play[-1] in stage.kept
        choosable = (stage.in_play < n) & (stage.in_play != stage.in_play[-1])
        kept = np.isin(stage.in_play, stage.kept)
        assert stage.scores[choosable & kept].min() >= stage.scores[choosable & ~kept].max(initial=0.0)


def test_a_word_has_one_score(llm: LLM) -> None:
    """The largest of its tokens', each of which is one byte here."""
    text = "The key: 7448cf3e-eb44-4659, or a_b: so. " * 3
    scores = [
        llm.generate(text, Pruning({1: 0.5}, scoring=scoring), max_new_tokens=1, trace=True).trace.stages[0].scores
        for scoring in (Scoring(smooth=3), Scoring(smooth=3, words=True))
    ]
    for part in re.finditer(r"[A-Za-z0-9_-]+|[ :,.]", text):
        alone, together = (of_all[part.start() : part.end()] for of_all in scores)
        assert (together == alone.max()).all()


def test_a_trace_is_a_frame(trace: Trace, llm: LLM) -> None:
    frame = trace.to_frame()
    assert len(frame) == sum(stage.in_play.size for stage in trace.stages)
    for stage in trace.stages:
        rows = frame[(frame["pass_"] == stage.pass_) & (frame["layer"] == stage.layer)]
        assert rows["position"].tolist() == stage.in_play.tolist()
        assert rows["score"].tolist() == stage.scores.tolist()
        assert rows["position"][rows["kept"]].tolist() == stage.kept.tolist()
        assert rows["token_id"].tolist() == [trace.token_ids[at] for at in stage.in_play]
    assert TEXT in "".join(frame[(frame["pass_"] == 0) & (frame["layer"] == 1)]["text"])
    dense = llm.generate(TEXT, max_new_tokens=2, trace=True).trace
    assert (len(dense.to_frame()), list(dense.to_frame())) == (0, list(frame))
    assert (len(dense.passes), dense.stages) == (2, [])
    assert f"all {SHAPE.n_layers} layers" in dense.heatmap()._repr_html_()


FETCHING = re.compile(r"<script|\b(src|href)=|http|url\(")


def text_of(html: str) -> str:
    """The text inside the picture's text box."""
    box = html[html.index('<div class="text">') :].partition("</div>")[0]
    return unescape(re.sub("<[^>]*>", "", box))


def test_it_shows_the_prompt_and_nothing_else(html: str, llm: LLM, made: Generation) -> None:
    assert text_of(html) == llm.tokenizer.decode(made.prompt_ids, skip_special_tokens=False)
    assert not FETCHING.search(html)
    assert "<b>" not in html


def test_the_legend_counts_every_prompt_token(trace: Trace, html: str, made: Generation) -> None:
    n = len(made.prompt_ids)
    assert sum(map(int, re.findall(r"layers: (\d+) tokens", unescape(html)))) == n
    assert "2 of 6 layers" in html
    assert "all 6 layers" in html
    revived = int((trace.depths[:n] > trace.prefill_depths).sum())
    assert revived > 0
    assert f"revived later: {revived} tokens" in html
    assert re.search(r'class="s3 revived" title="tokens? [\d to]+: 2 of 6 layers in prefill, \d by', html)


def test_it_saves_a_page_of_its_own(trace: Trace, html: str, tmp_path: Path) -> None:
    """A notebook scrolls long prompts, a page does not."""
    page = trace.heatmap().save(tmp_path / "map.html", title="A <title>").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert '<meta charset="utf-8">' in page
    assert "<title>A &lt;title&gt;</title>" in page
    assert not FETCHING.search(page)
    assert re.search(r"\.boxed \.text \{ max-height: \w+; overflow-y: auto; \}", html)
    assert 'class="lazyllm-map boxed"' in html
    assert 'class="lazyllm-map"' in page


def test_shades_are_by_the_share_of_the_layers(llm: LLM) -> None:
    pruning = Pruning({1: 0.9, 2: 0.6, 3: 0.3})
    trace = llm.generate("a b c d e f g h i j", pruning=pruning, max_new_tokens=1, trace=True).trace
    html = trace.heatmap()._repr_html_()
    shades = {int(shade): text for shade, text in re.findall(r'class="s(\d)">([^:]+) layers: ', html)}
    assert shades == {3: "2 of 6", 4: "3 of 6", 6: "4 of 6", 9: "all 6"}
    assert trace.heatmap()._repr_html_() == html


def test_text_stands_out_on_every_colour() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for page, falls in zip(STYLE.split("@media"), (True, False), strict=True):
        shades = re.findall(r"\.s(\d) { background: #(\w{6}); color: #(000|fff); }", page)
        assert [int(number) for number, _, _ in shades] == [*range(SHADES)]
        brightness = [luminance(colour) for _, colour, _ in shades]
        assert len({*brightness}) == SHADES
        assert brightness == sorted(brightness, reverse=falls)
        for (_, _, ink), light in zip(shades, brightness, strict=True):
            dark, bright = sorted((light, 0.0 if ink == "000" else 1.0))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_earlier_answers_are_shown_apart(llm: LLM) -> None:
    session = llm.session(STAGES)
    session.ask("First question", max_new_tokens=3)
    trace = session.ask(" and a second", max_new_tokens=2, trace=True).trace
    html = trace.heatmap()._repr_html_()
    assert text_of(html).startswith("First question")
    assert text_of(html).endswith(" and a second")
    assert 'class="answer"' in html
    with pytest.raises(ValueError, match="this answer has no trace; make it with trace=True"):
        session.ask(" and a third", max_new_tokens=1).trace  # noqa: B018
