"""The same on every node, a few nodes at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from micsctl.errors import MicsctlError
from micsctl.remote.host import Host

T = TypeVar("T")
H = TypeVar("H", bound=Host)


class FanoutError(MicsctlError):
    """Several nodes failed. `errors` holds (host name, error) in node order; the exit code is the first one's."""

    def __init__(self, errors: Sequence[tuple[str, MicsctlError]], of: int) -> None:
        why = "\n".join(_indented(name, error) for name, error in errors)
        next_commands = dict.fromkeys(error.next for _, error in errors if error.next)
        super().__init__(f"{len(errors)} of {of} nodes failed", why, next="\n".join(next_commands))
        self.errors = tuple(errors)
        self.exit_code = errors[0][1].exit_code


def each(hosts: Sequence[H], function: Callable[[H], T], *, at_most: int = 8) -> list[T]:
    """`function(host)` for every host, `at_most` at a time; results in the order of `hosts`.

    Every host is tried. One failure is raised as it is, several as one FanoutError that names every failing node; an
    exception that is no MicsctlError is a bug and is raised as it is. Ctrl-C starts nothing more, closes the hosts'
    connections (which ends what still runs; a host opens again when it is used again) and is raised.
    """
    if not hosts:
        return []
    pool = ThreadPoolExecutor(max_workers=min(at_most, len(hosts)), thread_name_prefix="node")
    try:
        futures = [pool.submit(function, host) for host in hosts]
        wait(futures)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for host in hosts:
            host.close()
        raise
    finally:
        pool.shutdown(wait=False)
    failures = [
        (host.name, error) for host, future in zip(hosts, futures, strict=True) if (error := future.exception())
    ]
    explained = [(name, error) for name, error in failures if isinstance(error, MicsctlError)]
    if len(explained) < len(failures):
        raise next(error for _, error in failures if not isinstance(error, MicsctlError))
    if len(explained) == 1:
        raise explained[0][1]
    if explained:
        raise FanoutError(explained, len(hosts))
    return [future.result() for future in futures]


def _indented(name: str, error: MicsctlError) -> str:
    what = error.what if name in error.what else f"{name}: {error.what}"
    return "\n".join([what, *(f"  {line}" for line in error.why.splitlines())])
