"""Other processes of Python."""

import os
import subprocess
import sys
from pathlib import Path


def python(script: str, *arguments: object, given: bytes = b"", **environment: str) -> str:
    """Returns the script's output, errors included; fails unless it ends well. It may import from this folder."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()
    return done.stdout.decode()
