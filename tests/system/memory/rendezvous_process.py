"""A process of a rendezvous: `rendezvous_process.py NAME CELLS CELL_PAYLOAD SUB_BLOCKS ROWS PROCESSES TIMEOUT_S`.

Prints `joined <identity>` or `refused <reason>`, then carries out commands from standard input until it is closed.
"""

from __future__ import annotations

import os
import sys
import time

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region_layout import RegionError
from nixl_tiers.memory.rendezvous import rendezvous


def send(*words: object) -> None:
    print(*words, flush=True)


def main() -> None:
    name, cells, cell_payload, sub_blocks, rows, processes, timeout_s = sys.argv[1:]
    send("ready")
    sys.stdin.readline()
    try:
        geometry = Geometry(int(cells), int(cell_payload), int(sub_blocks))
        region = rendezvous(name, geometry, int(rows), int(processes), float(timeout_s))
    except RegionError as error:
        send("refused", error)
        return
    send("joined", region.identity.hex())
    for line in sys.stdin:
        match line.split():
            case ["write", row, byte]:
                region.rows_view[int(row)] = int(byte)
                send("done")
            case ["read", row]:
                send(*sorted(set(region.rows_view[int(row)].tolist())))
            case ["fork"]:
                child = os.fork()
                if not child:
                    os.close(0)
                    os.close(1)
                    time.sleep(60)
                    os._exit(0)
                send(child)


main()
