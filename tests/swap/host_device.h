/* What csrc/swap.cu needs where no GPU is: one thread at a time, and asynchronous loads that are as late as they may be.
 *
 * A slot that a load was begun for holds poison until the load's group is waited for. Threads run one after the other, to
 * their ends, in any order: right only because none reads what another one wrote.
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

struct async_copy {
    swap_u128 *to;
    const swap_u128 *from;
};

struct host_thread {
    unsigned index = 0, block = 0, blocks = 0;
    std::vector<swap_u128> shared;
    std::vector<std::vector<async_copy>> groups{1}; /* the last one is open */
};

inline host_thread running;

inline unsigned thread_index() { return running.index; }
inline unsigned block_index() { return running.block; }
inline unsigned block_count() { return running.blocks; }
inline swap_u128 *shared_memory() { return running.shared.data(); }
inline void warp_fence() {}

inline void async_load(swap_u128 *to, const swap_u128 *from) {
    std::memset(to, 0xA5, sizeof *to);
    running.groups.back().push_back({to, from});
}

inline void async_commit() { running.groups.emplace_back(); }

template <int N>
inline void async_wait() {
    auto &groups = running.groups;
    while (groups.size() > N + 1) {
        for (auto copy = groups.front().rbegin(); copy != groups.front().rend(); ++copy)
            *copy->to = *copy->from;
        groups.erase(groups.begin());
    }
}

/* Every thread of a grid, blocks and threads in an order of their own. */
template <class Kernel, class Launch>
void run_grid(Kernel kernel, const Launch &launch, unsigned blocks, unsigned threads, size_t shared_bytes, unsigned seed) {
    std::vector<unsigned> order(blocks * threads);
    for (unsigned i = 0; i < order.size(); i++)
        order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (unsigned which : order) {
        running = host_thread();
        running.index = which % threads;
        running.block = which / threads;
        running.blocks = blocks;
        running.shared.resize(shared_bytes / sizeof(swap_u128));
        kernel(launch);
    }
}
