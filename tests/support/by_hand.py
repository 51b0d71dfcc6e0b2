"""What waits on threads elsewhere, and in these tests goes on when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class HandPool:
    """In place of a `ThreadPoolExecutor`: `run` does what its threads would."""

    def __init__(self) -> None:
        self.submitted: list[tuple[Future[Any], Callable[[], Any]]] = []
        """In order, what has not run yet."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted.append((future, lambda: work(*arguments)))
        return future

    def begin(self, count: int) -> list[tuple[Future[Any], Callable[[], Any]]]:
        """The next ones run, and can be cancelled no more; those that were cancelled are left out."""
        begun: list[tuple[Future[Any], Callable[[], Any]]] = []
        while self.submitted and len(begun) < count:
            future, work = self.submitted.pop(0)
            if future.set_running_or_notify_cancel():
                begun.append((future, work))
        return begun

    def run(self, count: int = 1 << 30) -> int:
        """Do the next ones; how many that were."""
        begun = self.begin(count)
        for future, work in begun:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 (the future's to raise)
                future.set_exception(error)
        return len(begun)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, _ in self.submitted:
                future.cancel()
