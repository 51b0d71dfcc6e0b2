"""What a request asks of the tiers: vLLM's `kv_load_tiers` and `kv_hints`, and `nixl_tiers` in `kv_transfer_params`.

A client wrote these, so whatever they hold is an answer and never an exception. What cannot be understood stores
nothing, since it may have been meant to forbid that, and loads as if it were not there, since every hit has the right
bytes. A hint (hints.py) that cannot be understood forbids nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.config.fields import shown
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.compat import ReqContext
from nixl_tiers.vllm.hints import FIELDS, NO_HINTS, Hints, HintsReader

log = logging.getLogger(__name__)

FIELD: Final = "nixl_tiers"  # of kv_transfer_params: all that is ours
HOST: Final = "cpu"


class Scope(StrEnum):
    """How far a request's chunks go down, or come up from."""

    ALL = "all"
    HOST = "host"  # host memory only
    NONE = "none"


@dataclass(frozen=True)
class RequestOptions:
    """`tiers`: the storage tiers that the request may load from, numbered as configured from 0; None: all of them.
    Without `loads` it finds nothing, not even in host memory."""

    store: Scope = Scope.ALL
    loads: bool = True
    tiers: frozenset[int] | None = None
    hints: Hints = NO_HINTS


class RequestOptionsReader:
    """Reads the options of requests, and logs once what of them cannot be understood.

    `names`, `localities`: of the storage tiers (`compat.allowed_tiers`).
    """

    def __init__(self, names: Sequence[str], localities: Sequence[str | None]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._localities = localities
        self._log = LogOnce(log)
        self.hints = HintsReader(lambda kind, text: self._log.report(f"hint {kind}", f"nixl_tiers: a request {text}"))

    def read(self, context: ReqContext) -> RequestOptions:
        """Never raises."""
        allowed = compat.allowed_tiers(context, self._localities)
        tiers = None if allowed is None else frozenset(allowed)
        params = context.kv_transfer_params if isinstance(context.kv_transfer_params, Mapping) else {}
        if params.get("do_remote_prefill"):  # another connector brings its KV cache, and would wait for storage too
            tiers = frozenset()
        own = params.get(FIELD)
        fields = own if isinstance(own, Mapping) else {}
        hints = self.hints.read(fields, context.kv_hints)
        if own is None:
            return RequestOptions(tiers=tiers, hints=hints)
        if not isinstance(own, Mapping):
            self._report("options", f"is {shown(own)}, not a table: nothing of such requests is stored")
            return RequestOptions(Scope.NONE, tiers=tiers, hints=hints)
        store = self._store(own)
        loads, named = self._load(own.get("load", Scope.ALL))
        if named is not None:
            tiers = named if tiers is None else tiers & named
        return RequestOptions(store, loads, tiers, hints)

    def _store(self, own: Mapping[object, object]) -> Scope:
        unknown = next((name for name in own if name not in ("store", "load", *FIELDS)), None)
        if unknown is not None:
            self._report("field", f"has the unknown field {shown(unknown)}: nothing of such requests is stored")
            return Scope.NONE
        wish = own.get("store", Scope.ALL)
        scope = _scope(wish)
        if scope is None:
            self._report("store", f'has store {shown(wish)}, not "all", "host" or "none": nothing of them is stored')
        return scope or Scope.NONE

    def _load(self, wish: object) -> tuple[bool, frozenset[int] | None]:
        """Whether to load anything, and the storage tiers to load from; None: all."""
        if isinstance(wish, list):
            known = frozenset(self._numbers[name] for name in wish if isinstance(name, str) and name in self._numbers)
            self._report_unknown(wish)
            return True, known
        scope = _scope(wish)
        if scope is None:
            self._report(
                "load",
                f'has load {shown(wish)}, not "all", "host", "none" or a list of tiers: they load from all tiers',
            )
        return scope is not Scope.NONE, frozenset() if scope is Scope.HOST else None

    def _report_unknown(self, names: Iterable[object]) -> None:
        for name in names:
            if not (isinstance(name, str) and (name == HOST or name in self._numbers)):
                tiers = ", ".join((HOST, *self._numbers))
                self._report("tier", f"has {shown(name)} in load, and the tiers are {tiers}: nothing is loaded from it")
                return

    def _report(self, kind: str, text: str) -> None:
        self._log.report(kind, f'nixl_tiers: "{FIELD}" in kv_transfer_params of a request {text}')


def _scope(wish: object) -> Scope | None:
    try:
        return Scope(wish)  # type: ignore[arg-type]
    except ValueError:
        return None
