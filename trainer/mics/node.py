"""Starts this node's ranks with torchrun and leaves a structured account of the first failure.

`python -m mics.node RUN_FOLDER [torchrun arguments] -m mics.train --config RUN_FOLDER/run.json` is torchrun
(`torch.distributed.run`) with two additions: the exit code is the failed rank's own instead of always 1, and
RUN_FOLDER/failure.json says which rank failed first, when, and how; after a stall also whom the others waited for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from mics.watch import STALLED, account_of


def main(arguments: list[str]) -> int:
    folder, *torchrun_arguments = arguments
    try:
        run(parse_args(torchrun_arguments))  # type: ignore[no-untyped-call]  # torch leaves both untyped
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        account = {
            "rank": rank,
            "local_rank": failure.local_rank,
            "exit_code": failure.exitcode,  # negative: ended by that signal
            "at_seconds": failure.timestamp,  # Unix time at which torchrun saw it
            "pid": failure.pid,
            "stall": account_of(Path(folder)) if failure.exitcode == STALLED else None,
        }
        target = Path(folder) / "failure.json"
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(account) + "\n")
        os.replace(partial, target)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # torchrun itself was asked to end, and has ended its ranks
        return 128 + int(error.sigval)
    return 0


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and how.

    Time stamps are whole seconds (torch 2.13, `ProcessFailure`), so they do not decide alone. A rank that a signal
    ended comes first; but with SIGABRT ranks end themselves, over a broken connection too; and SIGTERM is what torchrun
    sends to the others. After a stall the rank that stood still is killed by torchrun in the end: the ranks that ended
    themselves over it know why, so they come before all.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        code, seconds = item[1].exitcode, item[1].timestamp
        if code == STALLED:
            return -1, seconds
        if code == -signal.SIGTERM:
            return 2, seconds
        return (1 if code >= 0 or code == -signal.SIGABRT else 0), seconds

    return min(failures.items(), key=order)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
