"""What waits on threads elsewhere, and in these tests goes on when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Self


class HandPool:
    """In place of a `ThreadPoolExecutor`: `run` does what its threads would. `at_once`: all of it, whenever something
    is submitted."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.submitted: list[tuple[Future[Any], Callable[[], Any]]] = []
        """In order, what has not run yet."""
        self.was_waited_for = False

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted.append((future, lambda: work(*arguments)))
        if self.at_once:
            self.run()
        return future

    def map(self, work: Callable[[Any], Any], given: Iterable[Any]) -> Iterator[Any]:
        return map(work, given)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.was_waited_for |= wait
        if cancel_futures:
            for future, _ in self.submitted:
                future.cancel()


class HandThread:
    """In place of a `threading.Thread`. `at_once`: it runs when it is started; else when it is waited for."""

    def __init__(
        self, target: Callable[..., object], args: tuple[Any, ...] = (), *, at_once: bool, **_: object
    ) -> None:
        self._target: Callable[[], object] | None = lambda: target(*args)
        self._at_once = at_once

    def start(self) -> None:
        if self._at_once:
            self.join()

    def is_alive(self) -> bool:
        return self._target is not None

    def join(self, timeout_s: float | None = None) -> None:
        target, self._target = self._target, None
        if target is not None:
            target()
