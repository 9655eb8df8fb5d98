"""LongBench's prompt templates and answer lengths: located, checked, and compared with the official ones.

The templates are the benchmark's text and not part of this package; it holds their SHA-256 only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Any

from lazyllm.checkpoints.fields import shortened
from lazyllm.evaluation.longbench.datasets import dataset
from lazyllm.evaluation.longbench.items import Source, in_zip, is_text, resolve_data
from lazyllm.support.json_text import parse_object

PROMPT_FILE = "dataset2prompt.json"
LENGTH_FILE = "dataset2maxlen.json"
ORIGIN = "LongBench/config of https://github.com/THUDM/LongBench"
VARIABLE = "LAZYLLM_LONGBENCH"
FIELDS = ("input", "context")
MARK = "\0"
"""A context that no item has."""
SIZE_LIMIT = 1 << 20
MAX_NEW_TOKENS = 1 << 20

OFFICIAL: Mapping[str, str] = MappingProxyType(
    {
        "narrativeqa": "aada7ed24b06abace5b0045ac3bcfe06fc831a6cf434f0ecfd99fb7b3d299e1c",
        "qasper": "0fbdd123fe7f83d6d6a9c583ca28cb29d68e523bf8fec01a0cf2dcd11037775d",
        "multifieldqa_en": "20b4666a2de8a1f701bdb6c4e015fa9f8758d64b361d841f7766df6c9ceba770",
        "multifieldqa_zh": "344b3a4e557cd5470c661b3d6b374339717e1257a6c01f628d22322d4a554b94",
        "hotpotqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
        "2wikimqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
        "musique": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
        "dureader": "ae53329f51b17908e08b8c6bf366987282b8b38c0ee35275ebd7b79e9b30eff2",
        "gov_report": "91c25d585b189ced91c9280efcb4ecb5dcff9548cd4e3bfae66c68025b569e95",
        "qmsum": "dca23b678fe0183bbd9555b57947022aed1b85739da5ad7e1b4708dd0c71c409",
        "multi_news": "2af3f28c40b902e6535d4910510d51653613c49de9b2fc287c5958395061101d",
        "vcsum": "3e5d8241bc9b512eb4929c1ba80882a44f50b446bc2b1d9d79eff030dd10dc27",
        "trec": "0eff8bebdba99d91e9d7d91b6ab39455ac74648bea92c9255c9f68c62175b2db",
        "triviaqa": "00a802e6377e72fca39b169cf6c28893bedf23ba7286b03ecd15867c3e27a7c4",
        "samsum": "a68d884234907eefcaa0eacf7b2997f60fa46603988dceae6a44f9b49f045b3f",
        "lsht": "f3edabdf7fae53d6cadfa7a10f3574d114302161c46dacecd5d30763204bbbf3",
        "passage_count": "986550b6c61009c629a4535766d94b7b51e2b2b9e1ed169e4ecb54417466e964",
        "passage_retrieval_en": "39b96b7fa52bdd2aa2bde34ea199158505201b9a0a2c3ce94e80249293f60431",
        "passage_retrieval_zh": "c1e2346e245eb365bc33a1503cde2e473948a2aad51c3e4c72893e61ab074d60",
        "lcc": "6a1f24cf0bb83cd90f1fca8f0dd24801626c2aaea29db834ddc83b950e71190e",
        "repobench-p": "ee9ec182ea5ffeb70a7140d55baea97264a8612d88226d323afa90859c36240c",
    }
)


@dataclass(frozen=True)
class Templates:
    """Template and maximum of new tokens by data set, read from `source`; NAME_e shares those of NAME."""

    source: str
    prompts: Mapping[str, str]
    lengths: Mapping[str, int]

    def prompt(self, item: Mapping[str, Any]) -> str:
        """The prompt of one item."""
        return self.template(item["dataset"]).format(**{field: item[field] for field in FIELDS})

    def around(self, item: Mapping[str, Any]) -> tuple[str, str]:
        """The prompt's text before the context and after it."""
        before, _, after = self.prompt({**item, "context": MARK}).partition(MARK)
        return before, after

    def template(self, name: str) -> str:
        if (template := self.prompts.get(plain(name))) is None:
            raise ValueError(f"{self.source} has no template for {plain(name)}; expected one of {ORIGIN}")
        return template

    def max_new_tokens(self, name: str) -> int:
        if (length := self.lengths.get(plain(name))) is None:
            raise ValueError(
                f"{LENGTH_FILE} beside {self.source} has no length for {plain(name)}; "
                f"expected one of {ORIGIN}"
            )
        return length

    def digest(self, name: str) -> str:
        """SHA-256 of the template and length of a data set."""
        return digest(json.dumps([self.template(name), self.max_new_tokens(name)], ensure_ascii=False))

    def verdict(self, name: str) -> str:
        """The manifest's statement on the template of a data set."""
        return "official" if digest(self.template(name)) == OFFICIAL[plain(name)] else "not official"


def plain(name: str) -> str:
    return dataset(name).name.removesuffix("_e")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---- locating templates --------------------------------------------------------------------------


def find_templates(data: str | Path | None = None, prompts: str | Path | None = None) -> Templates:
    """The templates in the file `prompts`, or else those with the items in `data` ($LAZYLLM_LONGBENCH)."""
    if prompts is not None:
        return read_templates(Source(Path(prompts)))
    data = data or os.environ.get(VARIABLE)
    if not data:
        raise FileNotFoundError(
            f"{PROMPT_FILE} and {LENGTH_FILE}, the benchmark's prompts, are needed: get both from "
            f"{ORIGIN} and name their folder in {VARIABLE}, or give templates=find_templates(prompts=FILE)"
        )
    path = resolve_data(data)
    inside = in_zip(path, PROMPT_FILE) if path.suffix == ".zip" else None
    folders = places(path)
    beside = (Source(folder / PROMPT_FILE) for folder in folders if (folder / PROMPT_FILE).is_file())
    if source := inside or next(beside, None):
        return read_templates(source)
    raise FileNotFoundError(
        f"{PROMPT_FILE} and {LENGTH_FILE} are missing, the benchmark's prompts: get both from {ORIGIN} "
        f"and put them in {folders[0]}, or give the first as prompts (--prompts FILE); looked in "
        + ", ".join(map(str, folders))
    )


def places(path: Path) -> list[Path]:
    """Folders to look in: the data folder, or that of a data file, and its subfolder config."""
    folder = path if path.is_dir() else path.parent
    return [folder, folder / "config"]


def read_templates(source: Source) -> Templates:
    lengths = source.beside(LENGTH_FILE)
    return Templates(
        str(source),
        MappingProxyType({name: checked_template(source, name, text) for name, text in entries(source)}),
        MappingProxyType({name: checked_length(lengths, name, count) for name, count in entries(lengths)}),
    )


def entries(source: Source) -> Iterable[tuple[str, Any]]:
    if not source.exists():
        raise FileNotFoundError(f"{source} is missing; get {PROMPT_FILE} and {LENGTH_FILE} from {ORIGIN}")
    with source.open() as file:
        text = file.read(SIZE_LIMIT + 1)
    if len(text) > SIZE_LIMIT:
        raise ValueError(f"{source} has more than {SIZE_LIMIT} bytes; expected the file of {ORIGIN}")
    return parse_object(text, source).items()


def checked_template(source: Source, name: str, template: object) -> str:
    expected = f"a template with the fields {' and '.join(f'{{{field}}}' for field in FIELDS)} only"
    if not isinstance(template, str) or not is_text(template):
        raise ValueError(f"{source}: {name} is {shortened(template)}; expected {expected}")
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{source}: {name} is no template ({error}); expected {expected}") from error
    for _, field, form, conversion in parts:
        if field is not None and (field not in FIELDS or form or conversion):
            written = field + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ValueError(f"{source}: {name} has the field {{{written}}}; expected {expected}")
    return template


def checked_length(source: Source, name: str, length: object) -> int:
    if type(length) is not int or not 1 <= length <= MAX_NEW_TOKENS:
        raise ValueError(
            f"{source}: {name} is {shortened(length)}; expected a whole number from 1 to {MAX_NEW_TOKENS}"
        )
    return length
