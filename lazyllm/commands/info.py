"""`lazyllm info`"""

from __future__ import annotations

import argparse

SUMMARY = "show version, instruction sets, threads, CUDA and packages"
EXAMPLE = ""


def add(parser: argparse.ArgumentParser) -> None: ...


def run(args: argparse.Namespace) -> int:
    from lazyllm.machine.info import info

    print(info())
    return 0
