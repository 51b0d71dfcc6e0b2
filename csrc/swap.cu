/* The swap's kernels. Compiled by nvcc or NVRTC for GPUs; by a C++ compiler for tests, which then supplies what
 * the #else branch below names.
 *
 * A warp takes a tile at a time. No thread ever reads what another one wrote within a launch: there is nothing to
 * synchronise.
 */
#include "swap.h"

#ifdef __CUDACC__
#define SWAP_DEVICE __device__ __forceinline__

typedef uint4 swap_u128;

SWAP_DEVICE unsigned thread_index(void) { return threadIdx.x; }
SWAP_DEVICE unsigned block_index(void) { return blockIdx.x; }
SWAP_DEVICE unsigned block_count(void) { return gridDim.x; }
#else
#include SWAP_HOST_DEVICE /* the same names, on a CPU */
#endif

enum { WARP = 32, WARPS = 8 };

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

#define SWAP_KERNELS(N)                                                                                                \
    extern "C" __global__ void __launch_bounds__(WARP *WARPS)                                                          \
        nixl_tiers_stage_##N(const __grid_constant__ swap_launch<N> launch) {                                          \
        stage<N>(launch);                                                                                              \
    }

SWAP_KERNELS(480)
SWAP_KERNELS(3968)
