"""`lazyllm report`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options

SUMMARY = "make the report of a run or sweep anew, or one report of the folders of several machines"
EXAMPLE = "here/run there/run --out both"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="DIR", help="of runs or sweeps under equal conditions")
    out = "for the results of all folders and the report; needed for more than one folder"
    options.add(parser, "--out", out, "DIR", type=options.out_folder)


def run(args: argparse.Namespace) -> int:
    from lazyllm.evaluation.manifest import SCORE, read_manifest
    from lazyllm.longbench import Run, merge
    from lazyllm.support.files import user_path
    from lazyllm.sweeps.sweep import Sweep

    if "out" not in args and len(args.folders) > 1:
        raise ValueError("several folders need --out, the folder for the results of all of them")
    folder = merge(args.folders, args.out) if "out" in args else user_path(args.folders[0])
    scored = read_manifest(folder)["conditions"]["measure"] == SCORE
    result = Run(folder) if scored else Sweep.read(folder)
    result.report()
    return options.print_result(result)
