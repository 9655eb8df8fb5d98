"""`lazyllm serve` through the clients that people use: answers are those of `llm.generate`."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folders import SHAPE, TEMPLATE, model_folder

import lazyllm

openai = pytest.importorskip("openai", reason="needs the extra [test]: openai")
pytest.importorskip("starlette", reason="needs the extra [serve]: starlette, uvicorn, prometheus-client")
from serving import Server, serving  # noqa: E402  (imports uvicorn)

TEXT = "The keeper of the lighthouse was Tobias Brandt, who did not sleep well. " * 5
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
SETTINGS: list[Any] = [None, 2.0, "1.5x", "dense", {"1": 0.6, "3": 0.3}, {"method": "random", "keep": 0.5}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> lazyllm.LLM:
    """A tiny model whose chat template knows tools."""
    folder = model_folder(tmp_path_factory.mktemp("serve") / "tiny-model", replace(SHAPE, context=2000))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return lazyllm.load(folder, device="cpu", threads=2)


@pytest.fixture(scope="module")
def server(llm: lazyllm.LLM) -> Iterator[Server]:
    with serving(llm, pruning="2x") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def extra(pruning: Any) -> dict[str, Any]:
    return {} if pruning is None else {"extra_body": {"lazyllm": {"pruning": pruning}}}


@pytest.mark.parametrize("pruning", SETTINGS)
def test_answers_are_those_of_generate(llm: lazyllm.LLM, client: Any, pruning: Any) -> None:
    """Whole and streamed, in chats and for plain text; nothing given is the server's own setting."""
    setting = "2x" if pruning is None else pruning
    chat = llm.generate(MESSAGES, setting, max_new_tokens=12)
    plain = llm.generate(TEXT, setting, max_new_tokens=12)
    more = {"model": "tiny-model", "max_tokens": 12, **extra(pruning)}
    answers = client.chat.completions.create(messages=MESSAGES, **more)
    (choice,), used = answers.choices, answers.usage
    assert (choice.message.content, choice.finish_reason) == (chat.text, chat.finish_reason)
    assert (used.prompt_tokens, used.completion_tokens) == (chat.n_given, len(chat.token_ids))
    for name in ("speedup", "computed", "unpruned"):
        assert choice.lazyllm[name] == getattr(chat, name)
    assert lazyllm.parse_method(json.dumps(choice.lazyllm["pruning"])) == chat.pruning
    assert choice.lazyllm["in_play"] == chat.passes["in_play"][: llm.config.n_layers].tolist()
    assert client.completions.create(prompt=TEXT, **more).choices[0].text == plain.text

    more |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(messages=MESSAGES, **more)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.text
    assert len(chunks) > 7
    assert chunks[-1].choices[0].finish_reason == chat.finish_reason
    assert chunks[-1].choices[0].lazyllm["speedup"] == chat.speedup
    assert last.usage == used
    *chunks, _ = client.completions.create(prompt=TEXT, **more)
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.text


def test_sampling_and_stops_are_those_of_generate(llm: lazyllm.LLM, client: Any) -> None:
    sampling = lazyllm.SamplingParams(temperature=1.2, top_p=0.9, top_k=50, seed=7)
    sampled = {"model": "tiny-model", "temperature": 1.2, "top_p": 0.9, "seed": 7, "max_tokens": 9}
    sampled["extra_body"] = {"top_k": 50}
    wanted = llm.generate(MESSAGES, 2.0, n=3, sampling=sampling, max_new_tokens=9)
    for stream in (False, True):
        texts = dict.fromkeys(range(3), "")
        answer = client.chat.completions.create(messages=MESSAGES, n=3, stream=stream, **sampled)
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        assert (len(choices) > 9) == stream  # in pieces
        for choice in choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
        assert list(texts.values()) == [generation.text for generation in wanted]
    several = client.completions.create(prompt=[TEXT, TEXT + "So", [5, 6, 7]], **sampled)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    for i, (prompt, choice) in enumerate(zip([TEXT, TEXT + "So", [5, 6, 7]], several.choices, strict=True)):
        own = replace(sampling, seed=7 + i)
        assert choice.text == llm.generate(prompt, 2.0, sampling=own, max_new_tokens=9).text
    text = llm.generate(TEXT, 2.0, max_new_tokens=20).text
    cut = client.completions.create(model="tiny-model", prompt=TEXT, max_tokens=20, stop=["none", text[6:8]])
    assert cut.choices[0].text == text[: text.index(text[6:8])]
    assert cut.choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_generate(llm: lazyllm.LLM, client: Any) -> None:
    wanted = llm.generate(TEXT, 2.0, max_new_tokens=5, logprobs=3)
    assert wanted.logprobs is not None
    values = [table[token] for token, table in zip(wanted.token_ids, wanted.logprobs, strict=True)]
    more: dict[str, Any] = {"model": "tiny-model", "prompt": TEXT, "max_tokens": 5, "logprobs": 3}
    whole = client.completions.create(**more).choices[0].logprobs
    assert whole.token_logprobs == values
    assert [max(top.values()) for top in whole.top_logprobs] == values
    assert len("".join(whole.tokens)) == whole.text_offset[-1] + len(whole.tokens[-1])
    *_, last = client.completions.create(stream=True, **more)
    assert last.choices[0].logprobs == whole
    chat: dict[str, Any] = {"model": "tiny-model", "messages": MESSAGES, "max_tokens": 5, "logprobs": True}
    first = llm.generate(MESSAGES, 2.0, max_new_tokens=5, logprobs=2)
    content = client.chat.completions.create(top_logprobs=2, **chat).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * 5
    assert first.logprobs is not None
    assert content[0].logprob == first.logprobs[0][first.token_ids[0]]
    content = client.chat.completions.create(**chat).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [0] * 5


def test_tools_reach_the_template(llm: lazyllm.LLM, client: Any) -> None:
    answer = client.chat.completions.create(model="tiny-model", messages=MESSAGES, tools=TOOLS, max_tokens=6)
    wanted = llm.generate(MESSAGES, 2.0, tools=TOOLS, max_new_tokens=6)
    assert answer.choices[0].message.content == wanted.text
    assert answer.usage.prompt_tokens == len(wanted.prompt_ids) > llm.generate(MESSAGES, 2.0).n_given


def test_models_names_and_short_prompts(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-model"]
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'; this server has 'tiny-model'"):
        client.completions.create(model="gpt-4", prompt="Hi")
    answer = client.completions.create(model="tiny-model", prompt="Hi", max_tokens=2, **extra(2.0))
    assert answer.choices[0].lazyllm["speedup"] == 1.0
    assert "this one has 2" in answer.choices[0].lazyllm["unpruned"]


def test_without_a_limit_a_chat_may_fill_the_context(llm: lazyllm.LLM, client: Any) -> None:
    long = [{"role": "user", "content": "word " * 390}]
    answer = client.chat.completions.create(model="tiny-model", messages=long)
    assert answer.usage.total_tokens == llm.config.context


def test_messages_of_protected_roles_are_never_dropped(llm: lazyllm.LLM) -> None:
    """By role, and tools; the rest of the prompt is pruned, and the setting keeps its name in the metrics."""
    rules = "xRules: " + "never say so. " * 4
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": TEXT}]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 4}
    ids = llm.tokenizer.apply_chat_template(messages, tools=TOOLS)
    for roles, part in ("system", rules.strip()), ("tools", json.dumps(TOOLS)), ("system,tools", None):
        with serving(llm, {"1": 0.2}, protect=roles) as server:
            happened = server.post("/v1/chat/completions", body)[1]["choices"][0]["lazyllm"]
            assert b'_count{setting="{1: 0.2}"}' in server.send("GET", "/metrics")[2]
            wrong = server.post("/v1/chat/completions", {**body, "lazyllm": {"pruning": SETTINGS[-1]}})
        spans = happened["pruning"]["protect"]
        (first, end), *_ = spans
        assert part is None or llm.tokenizer.decode(ids[first:end]).strip() == part
        assert wrong[0] == 400
        assert "cannot protect parts of a prompt" in wrong[1]["error"]["message"]
        trace = llm.generate(ids, happened["pruning"], max_new_tokens=4, trace=True).trace
        assert all(trace.prefill_depths[first:end].min() == llm.config.n_layers for first, end in spans)
        assert trace.prefill_depths.min() < llm.config.n_layers
    assert len(spans) == 2


@pytest.mark.oracle
def test_the_harness_reads_answers_over_http(llm: lazyllm.LLM, server: Server) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="needs lm_eval[api]")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    model = completions.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny-model",
        tokenizer_backend=None,
        tokenized_requests=False,
        max_length=llm.config.context,
        num_concurrent=2,
    )
    how = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0, "do_sample": False}
    prompts = ["The sea", TEXT, TEXT + "So"]
    answers = model.generate_until([instance("generate_until", {}, (prompt, how), 0) for prompt in prompts])
    assert answers == [llm.generate(prompt, 2.0, max_new_tokens=8, stop=["\n"]).text for prompt in prompts]


def test_requests_that_begin_alike_share_what_is_read(llm: lazyllm.LLM) -> None:
    """Exactly, and within a limit of memory."""
    questions = [f"Question {i}: who slept?" for i in range(4)]
    alone = [llm.generate(TEXT * 2 + question, 2.0, max_new_tokens=8) for question in questions]
    room = 2 * llm.core.session(None).bytes_for(len(alone[0].prompt_ids))

    def ask(server: Server, prompt: str, n: int) -> str:
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": n})[1]
        return str(answer["choices"][0]["text"])

    with serving(llm, 2.0, cache_bytes=room) as server:
        cache = server.service.cache
        assert cache is not None
        for question, wanted in zip(questions, alone, strict=True):
            assert ask(server, TEXT * 2 + question, 8) == wanted.text
        assert cache.hits == 2  # the first is remembered, the second read apart and kept
        assert cache.tokens_shared > 2 * 700  # of 735 tokens in each
        for i in range(5):
            for _ in range(2):
                ask(server, f"{i}" + TEXT * 2, 1)
            assert 0 < cache.bytes <= room
    with serving(llm, 2.0, cache_bytes=0) as server:
        assert server.service.cache is None
        assert ask(server, TEXT * 2 + questions[0], 8) == alone[0].text


def test_the_command_needs_a_key_for_other_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lazyllm.commands.main import main

    assert main(["serve", "--model", str(folder), "--host", "0.0.0.0"]) == 2
    assert "needs a key" in capsys.readouterr().err


def test_the_command_answers_until_it_is_interrupted(folder: Path) -> None:
    """It ends well, and prints no traceback."""
    command = [sys.executable, "-m", "lazyllm", "serve", "--model", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://[\w.:]+", line)))
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            assert client.completions.create(model=folder.name, prompt="Hi", max_tokens=2).usage.completion_tokens == 2
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
    assert (process.returncode, "Traceback" in rest) == (0, False)
