"""The commands whose results are a folder: runs, sweeps, searches, calibrations, and their reports."""

import argparse
import sys

import lazyllm
from lazyllm.commands import options
from lazyllm.commands.options import Run
from lazyllm.evaluation.options import OF_PRESET, DataOptions, NiahOptions, RulerOptions, RunOptions


def longbench(parser: argparse.ArgumentParser) -> Run:
    """Run LongBench under one setting or several, time it, score it; run again, it resumes."""
    return command_of(parser, "run", DataOptions)


def ruler(parser: argparse.ArgumentParser) -> Run:
    """Run generated long-context tasks like RULER's under one setting or several; run again, it resumes."""
    return command_of(parser, "run_ruler", RulerOptions)


def niah(parser: argparse.ArgumentParser) -> Run:
    """Look for a needle at every depth of texts of several lengths, and draw a heat map."""
    return command_of(parser, "run_niah", NiahOptions)


def command_of(parser: argparse.ArgumentParser, function: str, kind: type[RunOptions]) -> Run:
    """The command that runs a function of lazyllm.longbench, whose options are of this kind."""
    options.add_pruning(parser)
    options.add_run(parser, kind)

    def run(args: argparse.Namespace) -> int:
        from lazyllm.evaluation.longbench.items import GET

        if kind is DataOptions and "data" not in args:
            print(f"without --data the tasks are generated; {GET}", file=sys.stderr)
        result = getattr(lazyllm.longbench, function)(options.loaded(args), **options.run_keywords(args, kind))
        return options.print_result(result)

    return run


def reproduce(parser: argparse.ArgumentParser) -> Run:
    """Make the paper's tables and figures for a checkpoint; run again, it runs what is missing."""
    targets = "table1, table2, figure1, figure5, figure6, figure7"
    parser.add_argument("targets", nargs="+", metavar="WHAT", help=targets)
    preset = "llama-2-7b-chat, xgen-7b-8k-inst or other; default: by the model's name"
    options.add(parser, "--preset", preset, "NAME")
    options.add(parser, "--speedup", "of all methods, by counted work; default that of the preset", "X")
    options.add(parser, "--seeds", "of random drop, default 5", "N")
    methods = "random, static, compress, fastkv, claa, gemfilter, lazyllm, recommended; default: all"
    options.add(parser, "--methods", methods, "NAME,…")
    options.add_run(parser, DataOptions, max_length=OF_PRESET, wrapper=OF_PRESET)

    def run(args: argparse.Namespace) -> int:
        keywords = options.run_keywords(args, DataOptions, "preset", "speedup", "seeds", "methods")
        result = lazyllm.reproduce.reproduce(options.loaded(args), args.targets, **keywords)
        print("\n".join([result.text, "", *(f"wrote {path}" for path in result.files)]).lstrip())
        if result.failed:
            print(f"{result.failed} results failed; items.jsonl of the runs says why", file=sys.stderr)
        return 1 if result.failed else 0

    return run


def sweep(parser: argparse.ArgumentParser) -> Run:
    """Try many settings on the same prompts: divergence from dense, speed, a Pareto picture; it resumes."""
    options.add_pruning(parser)
    space = (
        'in place of --pruning: lists of values as JSON, whose product is taken, such as {"layer": '
        '[5, 10], "keep": [0.5, 0.7]} (one stage) or {"stages": [{"10": 0.7}], "smooth": [1, 13]}'
    )
    options.add(parser, "--space", space, "AXES")
    prompt = "a prompt of yours in place of --data (repeatable); measured by kl"
    options.add(parser, "--prompt-file", prompt, "FILE", action="append")
    options.add(parser, "--measure", "kl (default): dense's own answer teacher-forced; score: answers, scored; or both")
    options.add(parser, "--tokens", "of dense's answer at most, default 16", "N")
    options.add_run(parser, DataOptions)

    def run(args: argparse.Namespace) -> int:
        from lazyllm.support.json_text import parse_json

        keywords = options.run_keywords(args, DataOptions, "measure", "tokens")
        if ("space" in args) == ("pruning" in args):
            raise ValueError("give --space, or --speedup or --pruning once for each setting")
        settings = keywords.pop("pruning", None) or parse_json(args.space, "--space")
        prompts = options.read_prompts(args)
        return options.print_result(lazyllm.sweep(options.loaded(args), settings, prompts=prompts, **keywords))

    return run


def report(parser: argparse.ArgumentParser) -> Run:
    """Make the report of a run or sweep anew, or one report of the folders of several machines."""
    parser.add_argument("folders", nargs="+", metavar="DIR", help="of runs or sweeps under equal conditions")
    out = "for the results of all folders and the report; needed for more than one folder"
    options.add(parser, "--out", out, "DIR", type=options.out_folder)

    def run(args: argparse.Namespace) -> int:
        from lazyllm.evaluation.results import SCORE, read_manifest
        from lazyllm.support.files import user_path

        if "out" not in args and len(args.folders) > 1:
            raise ValueError("several folders need --out, the folder for the results of all of them")
        folder = lazyllm.longbench.merge(args.folders, args.out) if "out" in args else user_path(args.folders[0])
        scored = read_manifest(folder)["conditions"]["measure"] == SCORE
        result = lazyllm.longbench.Run(folder) if scored else lazyllm.Sweep.read(folder)
        result.report()
        return options.print_result(result)

    return run


def calibrate(parser: argparse.ArgumentParser) -> Run:
    """Try a few schedules of a wished speedup on a checkpoint; the best is a preset; it resumes."""
    options.add_model(parser)
    options.add(parser, "--speedup", "counted speedup of prefill, default 2.5", "X", type=options.speedup)
    prompt = "a prompt of yours beside the generated ones (repeatable)"
    options.add(parser, "--prompt-file", prompt, "FILE", action="append")
    lengths = "tokens of the generated prompts with their answers, default 1024,2048"
    options.add(parser, "--lengths", lengths, "N,…")
    out = "the preset, such as preset.json; --pruning takes it. The folder preset.calibration is resumed"
    options.add(parser, "--out", out, "FILE", type=options.preset_file, required=True)
    options.add_device(parser)

    def run(args: argparse.Namespace) -> None:
        prompts = options.read_prompts(args)
        keywords = options.keywords_of(args, "speedup", "lengths", "out")
        print(f"{lazyllm.calibrate(options.loaded(args), prompts, **keywords)!r}\n\nwrote {args.out}")

    return run


def search(parser: argparse.ArgumentParser) -> Run:
    """Search stages and options that lose least, by Optuna; run again, it resumes."""
    options.add_model(parser)
    options.add(parser, "--speedup", "range of counted speedups of prefill, default 1.5,3", "LOW,HIGH")
    options.add(parser, "--budget", "settings to try, default 40", "N")
    prompt = "a prompt of yours (repeatable, at least 3); default: generated ones with needles"
    options.add(parser, "--prompt-file", prompt, "FILE", action="append")
    preset = "write preset.json: the setting that diverges least with a speedup of at least X"
    options.add(parser, "--preset", preset, "X")
    options.add(parser, "--out", "a search there continues", "DIR", type=options.out_folder, required=True)
    options.add(parser, "--workers", "processes of this machine, as in longbench", "N")
    options.add(parser, "--scheduler", "run on the workers of this Dask scheduler", "ADDRESS")
    options.add_device(parser)

    def run(args: argparse.Namespace) -> None:
        keywords = options.run_keywords(args, RunOptions, "speedup", "budget")
        result = lazyllm.search(options.loaded(args), options.read_prompts(args), **keywords)
        options.print_result(result)
        if "preset" in args:
            print(f"wrote {result.preset(speedup=args.preset).save(args.out / 'preset.json')}")

    return run
