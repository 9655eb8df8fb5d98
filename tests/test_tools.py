"""Tools of a chat: described by its template, for the whole conversation, and kept in a saved session."""

import json
from pathlib import Path

import pytest
from folders import TEMPLATE, model_folder

import lazyllm
from lazyllm import LLM

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "tides", "parameters": {}}}
WITH_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}" + TEMPLATE
CALL = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather"}}]},
    {"role": "tool", "content": "calm"},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = model_folder(tmp_path_factory.mktemp("tools"))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": WITH_TOOLS}))
    return lazyllm.load(folder, threads=1)


def text(llm: LLM, ids: list[int]) -> str:
    return llm.tokenizer.decode(ids, skip_special_tokens=False)


def test_the_template_describes_the_tools(llm: LLM) -> None:
    told = llm.generate("Hi", chat=True, tools=[WEATHER], max_new_tokens=1)
    assert text(llm, told.prompt_ids).startswith(f"<tools>[{json.dumps(WEATHER)}]")
    assert "<tools>" not in text(llm, llm.generate("Hi", chat=True, max_new_tokens=1).prompt_ids)
    stream = llm.stream("Hi", chat=True, tools=[WEATHER], max_new_tokens=1)
    assert stream.finished().prompt_ids == told.prompt_ids
    called = llm.generate(CALL, chat=True, tools=[WEATHER], max_new_tokens=1)
    assert "calm" in text(llm, called.prompt_ids)  # calls and their results are messages


def test_a_chat_keeps_its_tools(llm: LLM, tmp_path: Path) -> None:
    session = llm.session()
    session.ask("Hi", chat=True, tools=[WEATHER], max_new_tokens=2)
    session.save(tmp_path / "chat")
    want = session.fork().ask("And you?", chat=True, max_new_tokens=2)
    assert "<tools>" not in text(llm, want.prompt_ids)
    for restored in (session.fork(), llm.restore(tmp_path / "chat")):
        got = restored.ask("And you?", chat=True, tools=[WEATHER], max_new_tokens=2)
        assert (got.prompt_ids, got.token_ids) == (want.prompt_ids, want.token_ids)
        with pytest.raises(ValueError, match="other ones than its first prompt had"):
            restored.ask("And he?", chat=True, tools=[OTHER])
