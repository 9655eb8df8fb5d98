"""Facts about this installation and this machine: `lazyllm.info()`."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import lazyllm
from lazyllm import _core
from lazyllm.machine.cores import cores
from lazyllm.machine.device import cuda_facts
from lazyllm.support.files import system_values

PACKAGES = ["numpy", "safetensors", "tokenizers", "jinja2", "tqdm", "tiktoken"]
PACKAGES += ["sentencepiece", "huggingface_hub", "matplotlib"]
CPUINFO = Path("/proc/cpuinfo")


class Info(dict[str, Any]):
    """A dict that prints as a table."""

    def __repr__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in self.items())


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name} {version}" for name, version in value.items()]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def info() -> Info:
    """Version, instruction sets found and used, threads, CUDA or the reason why it is off, and packages."""
    features = _core.features()
    table = Info(
        version=lazyllm.__version__,
        location=os.path.dirname(os.path.abspath(lazyllm.__file__)),
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        processor=processor(),
        instruction_sets=features["instruction_sets"].split(),
        instruction_set_used=features["used"],
        compute={
            "f32": features["used"],
            "bf16": features["bf16"] or "off: the processor has neither AVX512-BF16 nor BF16 of ARM",
            "int8": features["int8"] or "off: the processor lacks AVX512-VNNI, or AVX2 without AVX-512, or ARM I8MM",
        },
        threads=cores(),
        compiler=features["compiler"],
        cuda=cuda_facts(),
        packages={name: installed for name in PACKAGES if (installed := version(name))},
    )
    if namesake := version("lazyllm"):
        table["warning"] = (
            f"the unrelated distribution lazyllm {namesake}, with the same module name, is installed too: "
            "pip uninstall lazyllm, then install lazyllm-engine again"
        )
    return table


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The CPU's model name, or its architecture where it has none, as on ARM."""
    return field(CPUINFO, "model name") or platform.machine()


def field(file: Path, name: str) -> str | None:
    """The first value with that name in a file of the system, or None."""
    return next(iter(system_values(file, name)), None)
