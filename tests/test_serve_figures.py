"""A server's measurements: metrics, comparisons with dense, the guard, and the page."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lazyllm
from lazyllm.evaluation.measures import forced_logits, greedy_answer, kl_divergence

pytest.importorskip("starlette", reason="needs the extra [serve]: starlette, uvicorn, prometheus-client")
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, serving, wait_for

from lazyllm.serving import shadow
from lazyllm.serving.options import Options

PROMPT = "The keeper of the lighthouse was Tobias Brandt, who did not sleep well. " * 3
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(llm: lazyllm.LLM) -> Iterator[Server]:
    with serving(llm, {"1": 0.5}) as server:
        yield server


def ask(server: Server, **more: Any) -> Any:
    status, answer = server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, **more})
    assert status == 200
    return answer["choices"][0]


def metrics(server: Server) -> dict[tuple[str, str], float]:
    """Values by name and setting."""
    text = server.send("GET", "/metrics")[2].decode()
    return {
        (sample.name, sample.labels.get("setting", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_metrics_count_each_setting(server: Server) -> None:
    happened = ask(server)["lazyllm"]
    ask(server, lazyllm={"pruning": "dense"})
    for question in ("And then?", "Who was it?"):
        ask(server, prompt=PROMPT + question, lazyllm={"pruning": {"1": 0.5}})
    values = metrics(server)
    wanted = {
        ("lazyllm_first_token_seconds_count", "{1: 0.5}"): 3,
        ("lazyllm_first_token_seconds_count", "dense"): 1,
        ("lazyllm_decode_step_seconds_count", "dense"): 1,
        ("lazyllm_computed_share_sum", "dense"): 1,
        ("lazyllm_counted_speedup_sum", "{1: 0.5}"): pytest.approx(3 * happened["speedup"], rel=0.1),
        ("lazyllm_revived_rows_count", "{1: 0.5}"): 3,
        ("lazyllm_running", ""): 0,
        ("lazyllm_waiting", ""): 0,
        ("lazyllm_cache_hits", ""): 1,
    }
    assert {name: values[name] for name in wanted} == wanted
    assert values["lazyllm_cache_bytes", ""] > 0
    assert values["process_resident_memory_bytes", ""] > 1e6
    assert happened["measured_speedup"] is None


def test_many_settings_share_a_label(llm: lazyllm.LLM) -> None:
    with serving(llm) as server:
        for i in range(40):
            ask(server, max_tokens=1, lazyllm={"pruning": {"1": 0.5 + i / 100}})
        values = metrics(server)
    settings = [setting for name, setting in values if name == "lazyllm_first_token_seconds_count"]
    assert len(settings) == 33
    assert values["lazyllm_first_token_seconds_count", "others"] == 8


def test_a_shadow_measures_the_divergence_of_answers(llm: lazyllm.LLM, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    setting = lazyllm.Pruning({1: 0.3})
    ids = llm.tokenizer.encode(PROMPT)
    dense = greedy_answer(llm.session(), ids, 16, llm.eos_token_ids)
    rows = np.array([*forced_logits(llm.session(setting), ids, dense.tokens)])
    with serving(llm, setting, shadow=1.0, log=str(file)) as server:
        ask(server)
        wait_for(lambda: lines(file))
        ask(server, lazyllm={"pruning": "dense"})
        wait_for(lambda: len(lines(file)) == 2)
        assert ask(server)["lazyllm"]["measured_speedup"] > 0
        values = metrics(server)
    first, second = lines(file)[:2]
    assert first["divergence_nats"] == pytest.approx(float(kl_divergence(dense.logits, rows).mean()))
    assert (first["setting"], first["prompt_tokens"]) == (setting.label, len(ids))
    assert (second["divergence_nats"], second["equal_answers"]) == (0, True)
    assert "prompt" not in first
    assert values["lazyllm_divergence_nats_count", "dense"] == 1
    assert values["lazyllm_divergence_nats_sum", "{1: 0.3}"] > 0.01


def test_a_shadow_waits_while_requests_run(llm: lazyllm.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then what it measured is no speedup; and the log has texts only where they are asked for."""
    file = tmp_path / "log.jsonl"
    with serving(llm, {"1": 0.5}, shadow=1.0, log=str(file), log_text=True) as server:
        looks, wait = list[int](), server.service.shadow._wait

        def request_in_first_layer() -> bool:
            looks.append(1)
            server.service.turns.requests += len(looks) == 2
            return wait()

        monkeypatch.setattr(server.service.shadow, "_wait", request_in_first_layer)
        ask(server)
        wait_for(lambda: len(looks) == 2)
        assert not lines(file)
        server.service.turns.requests -= 1
        wait_for(lambda: lines(file))
    (line,) = lines(file)
    assert line["measured_speedup"] is None
    assert line["prompt"] == PROMPT


def test_the_guard_lowers_and_raises_the_speedup(
    llm: lazyllm.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The divergence is planted: 0.1 for each speedup above 1, in the first phase; then hardly any."""
    file = tmp_path / "log.jsonl"
    slope = [0.1]

    def planted(llm: lazyllm.LLM, ids: Any, setting: Any, idle: Any) -> dict[str, Any]:
        divergence = slope[0] * (setting.factor - 1)
        return {"divergence_nats": divergence, "equal_answers": False, "measured_speedup": None}

    monkeypatch.setattr(shadow, "compared", planted)
    with serving(llm, speedup="1.2:2", shadow=1.0, guard=0.06, log=str(file)) as server:

        def speedup_after(answers: int) -> float:
            for _ in range(answers):
                before = len(lines(file))
                ask(server, max_tokens=1)
                wait_for(lambda before=before: len(lines(file)) > before)
            factor: float = server.service.guard.setting.factor
            return factor

        # 0.05, at 1.5, is below the bound, and above half of it
        phases = {0.1: [(3, 2.0), (1, 1.75), (4, 1.5), (9, 1.5)], 1.0: [(9, 1.2), (5, 1.2)]}
        for slope[0], steps in (phases | {0.0: [(16, 1.7), (16, 2.0)]}).items():
            for answers, speedup in steps:
                assert speedup_after(answers) == speedup
        ask(server, lazyllm={"pruning": 1.3})  # a setting that a client asks for is not judged
    changes = [line["guard"] for line in lines(file) if "guard" in line]
    assert [change["to"] for change in changes] == [1.75, 1.5, 1.25, 1.2, 1.45, 1.7, 1.95, 2.0]
    assert changes[0]["reason"] == "the divergence is above the bound"
    assert changes[-1]["reason"] == "the divergence is below half of the bound"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"guard": 0.2}, "guard changes nothing without shadow"),
        ({"guard": 0, "shadow": 0.1, "speedup": "1:2"}, "guard must be above 0, not 0"),
        ({"log": "a"}, "log changes nothing without shadow"),
        ({"log_text": True}, "log_text changes nothing without log"),
        ({"protect": "system,users"}, "a role of protect must be system"),
        ({"guard": 0.2, "shadow": 0.1, "speedup": "2"}, "guard needs the bounds of a speedup"),
        ({"guard": 0.2, "shadow": 0.1, "speedup": "3:2"}, "must ascend"),
        ({"speedup": "2", "pruning": "3x"}, "not both"),
        ({"speedup": "1:2"}, "pruning is '1:2'"),
        ({"shadow": 2}, "shadow must be from 0 to 1"),
        ({"log": "/nowhere/at/all", "shadow": 0.1}, "there is no such folder"),
        ({"pruning": "compress:ratio=0.5"}, "rewrites prompts"),
    ],
)
def test_options_are_checked(llm: lazyllm.LLM, options: dict[str, Any], words: str) -> None:
    from lazyllm.serving.app import Service

    with pytest.raises(ValueError, match=words):
        Service(llm, Options(**options))


def test_the_page_has_its_data(server: Server) -> None:
    """A browser's view of it is not tested here."""
    ask(server)
    page = server.send("GET", "/")[2].decode()
    points = json.loads(server.send("GET", "/recent")[2])
    fields = {name for point in points for name in point} | {"divergence_nats", "measured_speedup"}
    for field in ("first_token_seconds", "counted_speedup", "measured_speedup", "divergence_nats", "setting"):
        assert field in fields
        assert field in page
    assert server.send("GET", "/heat-map")[2] == b""
    ask(server, lazyllm={"trace": True})
    assert b"lazyllm-map" in server.send("GET", "/heat-map")[2]
