"""Processes that measure one thing each, with the devices to themselves, and print what they find as lines of JSON."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType


def printed(
    arguments: Sequence[str], *, env: Mapping[str, str] = MappingProxyType({}), seconds: float = threading.TIMEOUT_MAX
) -> Iterator[dict]:
    """The JSON objects that Python prints when it is started with these arguments, as they come.

    It is stopped after so many seconds, and when nobody reads on, so that it leaves the devices to others.
    subprocess.CalledProcessError, behind all that it printed, if it did not end well.
    """
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | env) as process:
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("{") and line.endswith("}\n"):
                    yield json.loads(line)
            process.wait()
        finally:
            timer.cancel()
            process.kill()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
