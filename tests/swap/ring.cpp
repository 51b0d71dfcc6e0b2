/* The ring's order against operations that are as late as they may be: a load lands only when its group is waited for, and
 * leaves poison until then; a store reads its slot only when the slot is released. Exits with 1 if an item went wrong.
 */
#include "swap_ring.h"

#include <cstdio>
#include <random>
#include <vector>

static const long POISON = -1;

struct late_ops {
    struct load_op {
        int slot;
        long value;
    };
    struct store_op {
        int slot;
        swap_u64 item;
    };
    std::vector<long> slots;
    std::vector<long> out;
    std::vector<std::vector<load_op>> groups{1};
    std::vector<store_op> stores;
    std::mt19937 rng;

    late_ops(int depth, swap_u64 n, unsigned seed) : slots(depth, POISON), out(n, POISON), rng(seed) {}

    void load(int slot, swap_u64 item) {
        slots.at(slot) = POISON;
        groups.back().push_back({slot, (long)item});
    }
    void commit() { groups.emplace_back(); }
    template <int N>
    void wait() {
        while (groups.size() > (size_t)N + 1) {
            for (auto &load : groups.front())
                slots.at(load.slot) = load.value;
            groups.erase(groups.begin());
        }
    }
    void store(int slot, swap_u64 item) {
        if (rng() % 4 == 0)
            out.at(item) = slots.at(slot);
        else
            stores.push_back({slot, item});
    }
    void release(int slot) {
        for (size_t i = 0; i < stores.size();)
            if (stores[i].slot == slot) {
                out.at(stores[i].item) = slots.at(slot);
                stores.erase(stores.begin() + i);
            } else {
                i++;
            }
    }
    bool right() const {
        for (size_t item = 0; item < out.size(); item++)
            if (out[item] != (long)item)
                return false;
        return stores.empty();
    }
};

template <int DEPTH>
static bool right() {
    for (unsigned seed = 0; seed < 5; seed++)
        for (swap_u64 n = 0; n < 4 * DEPTH + 3; n++) {
            late_ops ops(DEPTH, n, seed);
            swap_ring<DEPTH>(ops, n);
            if (!ops.right()) {
                std::printf("%d slots, %d items: an item went wrong\n", DEPTH, (int)n);
                return false;
            }
        }
    return true;
}

int main() { return right<1>() && right<2>() && right<3>() && right<4>() && right<8>() ? 0 : 1; }
