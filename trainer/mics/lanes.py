"""Threads that carry collectives while the main thread computes: what streams are on a GPU.

gloo has collectives that return at once, but not ones of two stages, and not a ring reduce-scatter. A lane runs whole
functions, in the order in which they are given. Ranks agree on the order of collectives in a process group as long as
one lane uses that group, and every rank gives the lane the same tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple[Future[Any], Callable[[], Any]]


class Lane:
    """One thread and its queue.

    A daemon: a rank that fails must not wait at its exit for a collective in which the others wait for it.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` after all that were given before; its value or its exception comes with the future."""
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """End the thread after the tasks that were given before."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
                future.set_exception(error)
            del item, future, task  # or the buffers of this collective would live until the next one
