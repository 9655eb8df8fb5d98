"""Builds lazyllm._core and, if asked for, liblazyllm_cuda. pyproject.toml has all other metadata.

LAZYLLM_CUDA=1 builds the CUDA core and fails without nvcc; 0 leaves it out; auto (the default) builds it if
the machine has nvcc and a GPU driver that can run what it builds.
"""

import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "cuda"))
import build_cuda

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.c"))
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))

# the Makefile has them, too; -gz compresses what -g1 adds
flags = ["-std=gnu11", "-O3", "-g1", "-gz", "-fvisibility=hidden", "-pthread"]
flags += ["-Wall", "-Wextra", "-Wno-unused-parameter"]

# One build for every CPython from 3.11 on; a free-threaded one needs a build of its own.
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildCores(build_ext):
    def run(self):
        nvcc, reason = build_cuda.wanted(os.environ.get("LAZYLLM_CUDA", "auto"))
        super().run()
        if self.inplace and stable:  # Python would find a core of its version alone before the one for all
            for older in Path("lazyllm").glob("_core.cpython-*.so"):
                older.unlink()
        print(f"the CUDA core is {'built' if nvcc else 'left out'}: {reason}")
        if nvcc:
            core = Path(self.get_ext_fullpath("lazyllm._core"))
            build_cuda.build(nvcc, core.parent / "liblazyllm_cuda.so", Path("build/cuda"))

    def build_extensions(self):
        """Compiles the files that have changed, as many at a time as there are cores.

        Objects stay in build/objects, where the next installation and the Makefile's C tests find them.
        """
        self.build_temp = "build/objects" if stable else f"build/objects-{sysconfig.get_config_var('SOABI')}"
        compile_all = self.compiler.compile
        newest_header = max(os.path.getmtime(path) for path in (*HEADERS, __file__))

        def compile_changed(sources, output_dir, **options):
            objects = self.compiler.object_filenames(sources, output_dir=output_dir)

            def is_current(source, made):
                newest = max(newest_header, os.path.getmtime(source))
                return os.path.exists(made) and os.path.getmtime(made) > newest

            pairs = zip(sources, objects, strict=True)
            changed = [source for source, made in pairs if not is_current(source, made)]
            print(f"compiling {len(changed)} of {len(sources)} C files", file=sys.stderr, flush=True)
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(lambda source: compile_all([source], output_dir, **options), changed))
            return objects

        self.compiler.compile = compile_changed
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildCores},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
    ext_modules=[
        Extension(
            "lazyllm._core",
            sources=SOURCES,
            depends=HEADERS,
            include_dirs=[numpy.get_include()],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if stable else [],
            py_limited_api=stable,
            extra_compile_args=flags,
            extra_link_args=["-pthread", "-gz"],
        )
    ],
)
