"""Writes the demonstration model with narrow layers of random weights, on which the notebooks run in seconds.

python tests/narrow_model.py FOLDER     and then LAZYLLM_CACHE=FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

from tiny import Shape, build

import lazyllm


def main(cache: Path) -> None:
    model = lazyllm.demo_model(progress=False)
    narrow = cache / model.name
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(model, narrow, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    shape = Shape(n_layers=config["num_hidden_layers"], vocab=config["vocab_size"], tied=True, dtype="BF16")
    (narrow / "config.json").write_text(json.dumps(config | shape.dimensions))
    build(shape, narrow).path.rename(narrow / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
