/* The order in which a ring of slots is filled and emptied: a template over the five things that it does, so that the same
 * order runs on a GPU and, on a CPU, against operations that are as late as they may be.
 *
 * Ops:
 *   load(slot, item)   begin to fill the slot with the item
 *   commit()           close a group: every load begun since the last one (perhaps none)
 *   wait<N>()          return when all groups but the N youngest have arrived
 *   store(slot, item)  begin to write the slot's bytes to where the item belongs
 *   release(slot)      return when that store has read the slot, which may then be filled again
 */
#ifndef NIXL_TIERS_SWAP_RING_H
#define NIXL_TIERS_SWAP_RING_H

#include "swap.h"

#ifdef __CUDACC__
#define SWAP_RING_FN __device__ __forceinline__
#else
#define SWAP_RING_FN static inline
#endif

/* Move items 0 to n - 1 with DEPTH slots. One group a turn, empty ones at the end: so the count to wait for is constant. */
template <int DEPTH, class Ops>
SWAP_RING_FN void swap_ring(Ops &ops, swap_u64 n) {
    if (n == 0)
        return;
    for (swap_u64 turn = 0; turn < n + DEPTH - 1; turn++) {
        if (turn < n) {
            if (turn >= DEPTH)
                ops.release((int)(turn % DEPTH));
            ops.load((int)(turn % DEPTH), turn);
        }
        ops.commit();
        if (turn >= DEPTH - 1) {
            ops.template wait<DEPTH - 1>();
            swap_u64 item = turn - (DEPTH - 1);
            ops.store((int)(item % DEPTH), item);
        }
    }
    for (int slot = 0; slot < DEPTH && (swap_u64)slot < n; slot++)
        ops.release(slot);
}

#endif
