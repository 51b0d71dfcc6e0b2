/* What csrc/swap.cu needs where no GPU is. Threads run one after the other, to their ends, in any order: right only because
 * none reads what another one wrote.
 */
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#define SWAP_DEVICE inline
#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__

struct alignas(16) swap_u128 {
    unsigned x, y, z, w;
};

struct host_thread {
    unsigned index = 0, block = 0, blocks = 0;
};

inline host_thread running;

inline unsigned thread_index() { return running.index; }
inline unsigned block_index() { return running.block; }
inline unsigned block_count() { return running.blocks; }

/* Every thread of a grid, blocks and threads in an order of their own. */
template <class Kernel, class Launch>
void run_grid(Kernel kernel, const Launch &launch, unsigned blocks, unsigned threads, unsigned seed) {
    std::vector<unsigned> order(blocks * threads);
    for (unsigned i = 0; i < order.size(); i++)
        order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (unsigned which : order) {
        running = host_thread();
        running.index = which % threads;
        running.block = which / threads;
        running.blocks = blocks;
        kernel(launch);
    }
}
