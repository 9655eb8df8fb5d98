"""Models of transformers in memory answer as transformers does, and as their files would."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from tolerances import LOGITS, error

import lazyllm
from lazyllm.errors import CheckpointError

PROMPT = list(range(3, 40))


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    """A random model of the family that the test names, or of a small Qwen 2."""
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=f"needs {package}")
    from make_recorded import random_model

    return random_model(FAMILIES[getattr(request, "param", "qwen2.5")], seed=1)


@pytest.mark.oracle
@pytest.mark.parametrize("model", sorted(FAMILIES.keys() - {"mimo"}), indirect=True)  # it has no MiMo
def test_each_family_in_each_type_has_the_logits_of_transformers(model: Any) -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = copy.deepcopy(model).to(dtype)
        model.load_state_dict(stored.state_dict())  # the same values in float32
        with torch.no_grad():
            expected = model(torch.tensor([PROMPT])).logits[0, -1].numpy()
        logits = lazyllm.from_transformers(stored, threads=1).session().forward(PROMPT)
        assert error(logits, expected) <= LOGITS["F32"]


@pytest.mark.oracle
def test_the_weights_are_those_of_the_call(model: Any, tmp_path: Path) -> None:
    model.bfloat16().save_pretrained(tmp_path)
    llm = lazyllm.from_transformers(model)
    model.model.embed_tokens.weight.data.zero_()
    logits = llm.session().forward(PROMPT)
    assert logits.tobytes() == lazyllm.load(tmp_path).session().forward(PROMPT).tobytes()
    assert llm.config.name == "Qwen2ForCausalLM"


@pytest.mark.oracle
def test_a_tokenizer_is_taken_over_with_its_chat_template(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    llm = lazyllm.from_transformers(
        transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype="auto"), tokenizer
    )
    stored = lazyllm.load(demo_model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    answer, expected = (model.generate(chat, max_new_tokens=8) for model in (llm, stored))
    assert (answer.prompt_ids, answer.token_ids) == (expected.prompt_ids, expected.token_ids)
    assert answer.text == expected.text
    assert llm.config.name == demo_model.name
    del llm
    assert not list(tmp_path.iterdir())


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"AutoModelForCausalLM\.from_pretrained"):
        lazyllm.from_transformers("owner/name")


@pytest.mark.oracle
def test_other_models_are_refused(model: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tensor .*: dtype F64 is not supported; F32"):
        lazyllm.from_transformers(model.double())
    model.merge_and_unload = lambda: model  # as PEFT's models have it
    with pytest.raises(TypeError, match=r"give the model that model\.merge_and_unload\(\) returns"):
        lazyllm.from_transformers(model)
