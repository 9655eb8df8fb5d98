"""Builds lazyllm._core. Everything else about the package stands in pyproject.toml.

LAZYLLM_SANITIZE=address,undefined compiles the core with those sanitizers.
"""

import os
from pathlib import Path

import numpy
from setuptools import Extension, setup

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.c"))
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))

flags = ["-std=gnu11", "-O3", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
link = ["-pthread"]
if sanitizers := os.environ.get("LAZYLLM_SANITIZE"):
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    link += [f"-fsanitize={sanitizers}"]

setup(
    ext_modules=[
        Extension(
            "lazyllm._core",
            sources=SOURCES,
            depends=HEADERS,
            include_dirs=[numpy.get_include()],
            extra_compile_args=flags,
            extra_link_args=link,
        )
    ]
)
