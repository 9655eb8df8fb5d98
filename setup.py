"""Builds lazyllm._core and, where wanted, liblazyllm_cuda. All else about the package is in pyproject.toml.

LAZYLLM_SANITIZE=address,undefined compiles the core with those sanitizers.
LAZYLLM_CUDA=1 builds the CUDA core and fails without nvcc, 0 leaves it out, auto (the default) builds it
where nvcc and a GPU are.
"""

import os
import sys
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "cuda"))
import build_cuda

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.c"))
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))

flags = ["-std=gnu11", "-O3", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
link = ["-pthread"]
if sanitizers := os.environ.get("LAZYLLM_SANITIZE"):
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    link += [f"-fsanitize={sanitizers}"]


class BuildCores(build_ext):
    def run(self):
        super().run()
        nvcc, reason = build_cuda.wanted(os.environ.get("LAZYLLM_CUDA", "auto"))
        print(f"the CUDA core is {'built' if nvcc else 'left out'}: {reason}")
        if nvcc:
            core = Path(self.get_ext_fullpath("lazyllm._core"))
            build_cuda.build(nvcc, core.parent / "liblazyllm_cuda.so", Path("build/cuda"))


setup(
    cmdclass={"build_ext": BuildCores},
    ext_modules=[
        Extension(
            "lazyllm._core",
            sources=SOURCES,
            depends=HEADERS,
            include_dirs=[numpy.get_include()],
            extra_compile_args=flags,
            extra_link_args=link,
        )
    ],
)
