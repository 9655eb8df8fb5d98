"""setuptools' build backend; with LAZYLLM_CUDA=1 it asks for PyPI's nvcc where the machine has none."""

import os
from typing import Any

import build_cuda
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that are not replaced below

NVCC = ["nvidia-cuda-nvcc>=13", "nvidia-cuda-runtime>=13", "nvidia-cuda-cccl>=13"]  # cccl: for its headers


def compiler() -> list[str]:
    return NVCC if os.environ.get("LAZYLLM_CUDA") == "1" and not build_cuda.find_nvcc() else []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *compiler()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *compiler()]
