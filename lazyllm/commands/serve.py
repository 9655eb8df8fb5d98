"""`lazyllm serve`: a model behind OpenAI's interface."""

from __future__ import annotations

import argparse
import os

from lazyllm.commands import options
from lazyllm.commands.options import Run

KEY = "LAZYLLM_API_KEY"


def serve(parser: argparse.ArgumentParser) -> Run:
    """Answer requests of OpenAI's interface over HTTP, each under a setting of its own."""
    options.add_model(parser)
    options.add_pruning(parser, action="store")
    options.add(parser, "--host", "default 127.0.0.1; others need a key")
    options.add(parser, "--port", "default 8000", "N")
    options.add(parser, "--api-key", f"that clients must send; default the variable {KEY}", "KEY")
    options.add_device(parser)

    def run(args: argparse.Namespace) -> int:
        from lazyllm.support.optional import package

        uvicorn = package("uvicorn", "lazyllm serve", "serve")
        package("starlette", "lazyllm serve", "serve")
        from lazyllm.serving.app import LOOPBACK, create
        from lazyllm.serving.service import Options, Service

        host, key = vars(args).get("host", LOOPBACK[0]), vars(args).get("api_key", os.environ.get(KEY))
        if host not in LOOPBACK and not key:
            raise ValueError(f"a server that other machines reach needs a key: give --api-key, or set {KEY}")
        service = Service(options.loaded(args), vars(args).get("pruning"), Options())
        config = uvicorn.Config(
            create(service, key or None, host), host, vars(args).get("port", 8000), http="h11"
        )
        uvicorn.Server(config).run()
        return 0

    return run
