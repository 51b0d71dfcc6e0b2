/* Runs the kernels of swap.cu on a CPU under the sanitizers, on buffers that end where their bytes end.
 *
 * kernels CASE RESULT: CASE holds little-endian u64s (see test_kernels.py), then engine and region bytes. RESULT receives the
 * region after a store by the staged kernel. The store is loaded back into poisoned engine memory, which must then be what
 * it was where blocks were moved and poison elsewhere.
 */
#define SWAP_HOST_DEVICE "host_device.h"
#include "../../../csrc/swap.cu"

#include <cstdio>
#include <cstdlib>

typedef swap_launch<480> launch_t;

static swap_u64 number(FILE *in) {
    swap_u64 value;
    if (std::fread(&value, sizeof value, 1, in) != 1)
        std::abort();
    return value;
}

/* Like one of the engine's tensors: begins as far from a multiple of 16 as the real one, ends with its last byte. */
struct memory {
    char *block, *data;
    size_t size;
    memory(size_t size, size_t skew) : block((char *)std::malloc(skew + size)), data(block + skew), size(size) {}
    memory(const memory &) = delete;
    memory(memory &&other) : block(other.block), data(other.data), size(other.size) { other.block = nullptr; }
    ~memory() { std::free(block); }
};

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    FILE *in = std::fopen(argv[1], "rb"), *out = std::fopen(argv[2], "wb");
    if (!in || !out)
        return 2;
    swap_rows rows = {};
    rows.row_bytes = number(in);
    rows.cell_offset = number(in);
    rows.sub_block_bytes = number(in);
    rows.sub_blocks = number(in);
    size_t n_rows = number(in), n_parts = number(in), n_pairs = number(in), blocks = number(in);
    std::vector<swap_segment> parts(n_parts);
    for (auto &part : parts) {
        part.address = number(in);
        part.block_stride = number(in);
        part.nbytes = number(in);
        part.offset = number(in);
    }
    launch_t launch = {};
    for (size_t i = 0; i < n_pairs; i++) {
        launch.pairs[i].block = (swap_u32)number(in);
        launch.pairs[i].place = (swap_u32)number(in);
    }
    std::vector<swap_u32> first(number(in));
    for (auto &part : first)
        part = (swap_u32)number(in);
    std::vector<memory> engine;
    for (auto &part : parts)
        if (part.address) {
            engine.emplace_back((blocks - 1) * part.block_stride + part.nbytes, part.address % 16);
            if (std::fread(engine.back().data, 1, engine.back().size, in) != engine.back().size)
                return 2;
            part.address = (swap_u64)engine.back().data;
        }
    std::vector<std::vector<char>> before;
    for (auto &tensor : engine)
        before.emplace_back(tensor.data, tensor.data + tensor.size);
    memory region(n_rows * rows.row_bytes, 0), staging(n_pairs * rows.sub_block_bytes, 0);
    std::vector<char> fresh(region.size);
    if (std::fread(fresh.data(), 1, fresh.size(), in) != fresh.size())
        return 2;
    rows.region = (swap_u64)region.data;
    launch.job = {rows, (swap_u64)parts.data(), (swap_u64)first.data(), 0, (swap_u32)n_parts, (swap_u32)first.size(),
                  (swap_u32)n_pairs, 1};

    std::memcpy(region.data, fresh.data(), fresh.size());
    launch.job.staging = (swap_u64)staging.data;
    auto row = [&](size_t i) { return (char *)swap_place_address(&rows, launch.pairs[i].place); };
    for (int to_host = 1; to_host >= 0; to_host--) {
        launch.job.to_host = to_host;
        if (!to_host)
            for (auto &tensor : engine)
                std::memset(tensor.data, 0x5A, tensor.size);
        for (size_t i = 0; !to_host && i < n_pairs; i++)
            std::memcpy(staging.data + i * rows.sub_block_bytes, row(i), rows.sub_block_bytes);
        run_grid(nixl_tiers_stage_480, launch, 3, 256, 1);
        for (size_t i = 0; to_host && i < n_pairs; i++)
            std::memcpy(row(i), staging.data + i * rows.sub_block_bytes, rows.sub_block_bytes);
    }
    std::fwrite(region.data, 1, region.size, out);
    size_t index = 0;
    for (auto &part : parts)
        if (part.address) {
            std::vector<char> wanted(engine[index].size, 0x5A);
            for (size_t i = 0; i < n_pairs; i++)
                std::memcpy(&wanted[launch.pairs[i].block * part.block_stride],
                            &before[index][launch.pairs[i].block * part.block_stride], part.nbytes);
            if (std::memcmp(wanted.data(), engine[index].data, wanted.size())) {
                std::fprintf(stderr, "wrong engine bytes after a load\n");
                return 3;
            }
            index++;
        }
    std::fclose(in);
    return std::fclose(out) ? 2 : 0;
}
