"""`lazyllm serve`: a model behind OpenAI's interface."""

import argparse
import os
from dataclasses import fields

from lazyllm.commands import options
from lazyllm.commands.options import Run
from lazyllm.serving.options import Options

KEY = "LAZYLLM_API_KEY"
MOST_CONNECTIONS = 1024
GRACE = 30  # seconds that requests have to end in after SIGTERM


def serve(parser: argparse.ArgumentParser) -> Run:
    """Answer requests of OpenAI's interface over HTTP, each under a setting of its own."""
    options.add_model(parser)
    options.add(parser, "--host", "default 127.0.0.1; others need a key")
    options.add(parser, "--port", "default 8000", "N")
    options.add(parser, "--api-key", f"that clients must send; default the variable {KEY}", "KEY")
    options.add_options(parser, Options)
    options.add_device(parser)

    def run(args: argparse.Namespace) -> None:
        from lazyllm.support.optional import package

        for name in "starlette", "prometheus_client", "uvicorn":
            uvicorn = package(name, "lazyllm serve", "serve")
        from lazyllm.serving.app import LOOPBACK, Service, create

        host, key = vars(args).get("host", LOOPBACK[0]), vars(args).get("api_key", os.environ.get(KEY))
        if host not in LOOPBACK and not key:
            raise ValueError(f"a server that other machines reach needs a key: give --api-key, or set {KEY}")
        chosen = Options(**options.keywords_of(args, *(option.name for option in fields(Options))))
        service = Service(options.loaded(args), chosen)
        limits = {"timeout_graceful_shutdown": GRACE, "limit_concurrency": MOST_CONNECTIONS}
        place = {"host": host, "port": vars(args).get("port", 8000)}
        try:
            uvicorn.run(create(service, key or None, host), **place, **limits, http="h11", lifespan="off")
        finally:
            service.close()

    return run
