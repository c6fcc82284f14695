"""Starts this node's ranks with torchrun and leaves a structured account of the first failure.

`python -m mics.node RUN_FOLDER [torchrun arguments] -m mics.train --config RUN_FOLDER/run.json` is torchrun
(`torch.distributed.run`) with two additions: the exit code is the failed rank's own instead of always 1, and
RUN_FOLDER/failure.json says which rank failed first, when, and how.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(arguments: list[str]) -> int:
    folder, *torchrun_arguments = arguments
    try:
        run(parse_args(torchrun_arguments))  # type: ignore[no-untyped-call]  # torch leaves both untyped
    except ChildFailedError as error:
        # torchrun ends the other ranks with SIGTERM: such an end is a consequence, whatever the time stamps say
        causes = {r: f for r, f in error.failures.items() if f.exitcode != -signal.SIGTERM} or error.failures
        rank, failure = min(causes.items(), key=lambda item: item[1].timestamp)
        account = {
            "rank": rank,
            "local_rank": failure.local_rank,
            "exit_code": failure.exitcode,  # negative: ended by that signal
            "at_seconds": failure.timestamp,  # Unix time at which torchrun saw it
            "pid": failure.pid,
        }
        target = Path(folder) / "failure.json"
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(account) + "\n")
        os.replace(partial, target)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
