/* The swap's kernels. Compiled by nvcc or NVRTC for GPUs; by a C++ compiler for tests, which then supplies what
 * the #else branch below names.
 *
 * A warp takes a tile at a time. No thread ever reads what another one wrote within a launch: each lane takes the same bytes
 * of a tile out of shared memory that it put there. So there is nothing to synchronise but a lane with itself.
 */
#include "swap.h"
#include "swap_ring.h"

#ifdef __CUDACC__
#define SWAP_DEVICE __device__ __forceinline__

typedef uint4 swap_u128;

SWAP_DEVICE unsigned thread_index(void) { return threadIdx.x; }
SWAP_DEVICE unsigned block_index(void) { return blockIdx.x; }
SWAP_DEVICE unsigned block_count(void) { return gridDim.x; }

SWAP_DEVICE swap_u128 *shared_memory(void) {
    extern __shared__ swap_u128 swap_shared[];
    return swap_shared;
}

/* 16 bytes into shared memory, past the first-level cache: nothing is read twice. Arrives at some time before its group. */
SWAP_DEVICE void async_load(swap_u128 *to, const swap_u128 *from) {
    unsigned slot = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(slot), "l"(__cvta_generic_to_global(from)) : "memory");
}

SWAP_DEVICE void async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
SWAP_DEVICE void async_wait(void) { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

SWAP_DEVICE void warp_fence(void) { __syncwarp(); }
#else
#include SWAP_HOST_DEVICE /* the same names, on a CPU */
#endif

enum { WARP = 32, WARPS = 8, RING_DEPTH = 4, RING_CHUNKS = SWAP_TILE / 16 };

/* What a launch carries in its parameters: 480 pairs fit every GPU's 4 KiB, 3968 the 32 KiB of CUDA 12.1 and later. */
template <int N>
struct swap_launch {
    swap_job job;
    swap_pair pairs[N];
};

/* ---- any bytes to anywhere ---- */

template <class V>
SWAP_DEVICE void copy_as(char *to, const char *from, swap_u64 nbytes, unsigned lane) {
    V *t = (V *)to;
    const V *f = (const V *)from;
    swap_u64 n = nbytes / sizeof(V), i = lane;
    for (; i + 3 * WARP < n; i += 4 * WARP) { /* four loads under way before the first store */
        V a = f[i], b = f[i + WARP], c = f[i + 2 * WARP], d = f[i + 3 * WARP];
        t[i] = a;
        t[i + WARP] = b;
        t[i + 2 * WARP] = c;
        t[i + 3 * WARP] = d;
    }
    for (; i < n; i += WARP)
        t[i] = f[i];
}

/* Both addresses are equally far from a multiple of sizeof(V). */
template <class V>
SWAP_DEVICE void copy_aligned(char *to, const char *from, swap_u64 nbytes, unsigned lane) {
    swap_u64 head = (0 - (swap_u64)to) % sizeof(V);
    if (head > nbytes)
        head = nbytes;
    swap_u64 body = (nbytes - head) / sizeof(V) * sizeof(V), tail = nbytes - head - body;
    if (lane < head)
        to[lane] = from[lane];
    copy_as<V>(to + head, from + head, body, lane);
    if (lane < tail)
        to[head + body + lane] = from[head + body + lane];
}

SWAP_DEVICE void copy_bytes(swap_u64 to, swap_u64 from, swap_u64 nbytes, unsigned lane) {
    swap_u64 skew = to ^ from;
    if (skew % 16 == 0)
        copy_aligned<swap_u128>((char *)to, (const char *)from, nbytes, lane);
    else if (skew % 4 == 0)
        copy_aligned<swap_u32>((char *)to, (const char *)from, nbytes, lane);
    else
        copy_as<char>((char *)to, (const char *)from, nbytes, lane);
}

SWAP_DEVICE void zero_bytes(swap_u64 to, swap_u64 nbytes, unsigned lane) {
    swap_u64 head = (0 - to) % 16;
    if (head > nbytes)
        head = nbytes;
    swap_u64 body = (nbytes - head) / 16, tail = nbytes - head - body * 16;
    swap_u128 zero = {0, 0, 0, 0};
    if (lane < head)
        ((char *)to)[lane] = 0;
    for (swap_u64 i = lane; i < body; i += WARP)
        ((swap_u128 *)(to + head))[i] = zero;
    if (lane < tail)
        ((char *)(to + head + body * 16))[lane] = 0;
}

/* ---- which bytes ---- */

/* One tile of one pair, and the parts that reach into it. */
struct tile {
    const swap_segment *parts;
    swap_u32 n_parts, first, index;
    swap_u64 pair;
};

SWAP_DEVICE tile tile_of(const swap_job &job, swap_u64 item) {
    tile t;
    t.parts = (const swap_segment *)job.parts;
    t.n_parts = job.n_parts;
    t.pair = item / job.n_tiles;
    t.index = (swap_u32)(item - t.pair * job.n_tiles);
    t.first = ((const swap_u32 *)job.first_part)[t.index];
    return t;
}

/* ---- staged: engine pages <-> one sub-block per pair, side by side in GPU memory ---- */

template <int N>
SWAP_DEVICE void stage(const swap_launch<N> &launch) {
    const swap_job &job = launch.job;
    unsigned lane = thread_index() % WARP;
    swap_u64 warp = (swap_u64)block_index() * WARPS + thread_index() / WARP;
    swap_u64 n_items = (swap_u64)job.n_pairs * job.n_tiles;
    for (swap_u64 item = warp; item < n_items; item += (swap_u64)block_count() * WARPS) {
        tile t = tile_of(job, item);
        swap_u64 staged = job.staging + t.pair * job.rows.sub_block_bytes;
        for (swap_u32 p = t.first; p < t.n_parts; p++) {
            swap_gap piece = swap_piece(&t.parts[p], t.index);
            if (!piece.nbytes)
                break; /* parts are in order: the first that stands beyond the tile ends it */
            if (!t.parts[p].address) {
                if (job.to_host)
                    zero_bytes(staged + piece.offset, piece.nbytes, lane);
                continue;
            }
            swap_u64 engine = swap_engine_address(&t.parts[p], launch.pairs[t.pair].block, piece.offset);
            swap_u64 row = staged + piece.offset;
            copy_bytes(job.to_host ? row : engine, job.to_host ? engine : row, piece.nbytes, lane);
        }
    }
}

/* ---- ring: engine pages <-> rows, over the bus, by a few warps with many loads under way ---- */

/* One warp's ring. Every address, offset and size is a multiple of 16: the host refuses this path otherwise. */
template <int N>
struct ring_ops {
    const swap_launch<N> &launch;
    swap_u128 *slots;
    swap_u64 warp, n_warps;
    unsigned lane;

    SWAP_DEVICE tile item_tile(swap_u64 item) const { return tile_of(launch.job, warp + item * n_warps); }

    SWAP_DEVICE swap_u64 row_address(const tile &t) const {
        return swap_place_address(&launch.job.rows, launch.pairs[t.pair].place);
    }

    SWAP_DEVICE void load(int slot, swap_u64 item) {
        tile t = item_tile(item);
        for (swap_u32 p = t.first; p < t.n_parts; p++) {
            swap_gap piece = swap_piece(&t.parts[p], t.index);
            if (!piece.nbytes)
                break;
            if (!t.parts[p].address)
                continue;
            swap_u64 from = launch.job.to_host
                                ? swap_engine_address(&t.parts[p], launch.pairs[t.pair].block, piece.offset)
                                : row_address(t) + piece.offset;
            swap_u128 *chunks = slots + slot * RING_CHUNKS + piece.offset % SWAP_TILE / 16;
            for (swap_u64 i = lane; i < piece.nbytes / 16; i += WARP)
                async_load(&chunks[i], (const swap_u128 *)from + i);
        }
    }

    SWAP_DEVICE void commit() { async_commit(); }

    template <int PENDING>
    SWAP_DEVICE void wait() {
        async_wait<PENDING>();
    }

    SWAP_DEVICE void store(int slot, swap_u64 item) {
        tile t = item_tile(item);
        for (swap_u32 p = t.first; p < t.n_parts; p++) {
            swap_gap piece = swap_piece(&t.parts[p], t.index);
            if (!piece.nbytes)
                break;
            swap_u64 row = row_address(t) + piece.offset;
            if (!t.parts[p].address) {
                if (launch.job.to_host)
                    zero_bytes(row, piece.nbytes, lane);
                continue;
            }
            swap_u64 to = launch.job.to_host
                              ? row
                              : swap_engine_address(&t.parts[p], launch.pairs[t.pair].block, piece.offset);
            const swap_u128 *chunks = slots + slot * RING_CHUNKS + piece.offset % SWAP_TILE / 16;
            for (swap_u64 i = lane; i < piece.nbytes / 16; i += WARP)
                ((swap_u128 *)to)[i] = chunks[i];
        }
    }

    SWAP_DEVICE void release(int) { warp_fence(); }
};

template <int N>
SWAP_DEVICE void ring(const swap_launch<N> &launch) {
    swap_u64 warp = (swap_u64)block_index() * WARPS + thread_index() / WARP;
    swap_u64 n_warps = (swap_u64)block_count() * WARPS;
    swap_u64 n_items = (swap_u64)launch.job.n_pairs * launch.job.n_tiles;
    swap_u128 *slots = shared_memory() + thread_index() / WARP * (RING_DEPTH * RING_CHUNKS);
    ring_ops<N> ops = {launch, slots, warp, n_warps, thread_index() % WARP};
    swap_ring<RING_DEPTH>(ops, warp < n_items ? (n_items - warp + n_warps - 1) / n_warps : 0);
}

#define SWAP_KERNELS(N)                                                                                                \
    extern "C" __global__ void __launch_bounds__(WARP *WARPS)                                                          \
        nixl_tiers_stage_##N(const __grid_constant__ swap_launch<N> launch) {                                          \
        stage<N>(launch);                                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARP *WARPS)                                                          \
        nixl_tiers_ring_##N(const __grid_constant__ swap_launch<N> launch) {                                           \
        ring<N>(launch);                                                                                               \
    }

SWAP_KERNELS(480)
SWAP_KERNELS(3968)
