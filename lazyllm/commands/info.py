"""`lazyllm info`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options


def add(commands: options.Commands) -> None:
    options.new_command(
        commands, "info", run, "show version, instruction sets, threads, CUDA and packages", example="info"
    )


def run(args: argparse.Namespace) -> int:
    from lazyllm.machine.info import info

    print(info())
    return 0
