/* Runs one swap of swap_cpu.c under the sanitizers, on buffers that end exactly where their bytes end.
 *
 * driver CASE RESULT: CASE holds little-endian u64s (see test_sanitized.py), then engine and region bytes;
 * RESULT receives both as they are afterwards.
 */
#include "../../csrc/swap_cpu.c"

#include <stdio.h>
#include <stdlib.h>

static swap_u64 number(FILE *in) {
    swap_u64 value;
    if (fread(&value, sizeof value, 1, in) != 1)
        abort();
    return value;
}

static char *bytes(FILE *in, size_t size, size_t skew, char **block) {
    *block = malloc(skew + size); /* the sanitizer's redzone follows the last byte at once */
    if (fread(*block + skew, 1, size, in) != size)
        abort();
    return *block + skew;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    if (!in || !out)
        return 2;
    int to_host = (int)number(in), kernel = (int)number(in);
    size_t n_rows = number(in), skew = number(in);
    swap_rows rows = {.row_bytes = number(in)};
    rows.cell_offset = number(in);
    rows.sub_block_bytes = number(in);
    rows.sub_blocks = number(in);
    size_t n_segments = number(in), n_gaps = number(in), n_pairs = number(in);
    swap_segment *segments = calloc(n_segments, sizeof *segments);
    size_t *sizes = calloc(n_segments + 1, sizeof *sizes);
    char **blocks = calloc(n_segments + 1, sizeof *blocks);
    swap_gap *gaps = calloc(n_gaps, sizeof *gaps);
    swap_pair *pairs = calloc(n_pairs, sizeof *pairs);
    for (size_t i = 0; i < n_segments; i++) {
        segments[i].block_stride = number(in);
        segments[i].nbytes = number(in);
        segments[i].offset = number(in);
        sizes[i] = number(in);
    }
    for (size_t i = 0; i < n_gaps; i++) {
        gaps[i].offset = number(in);
        gaps[i].nbytes = number(in);
    }
    for (size_t i = 0; i < n_pairs; i++) {
        pairs[i].block = (swap_u32)number(in);
        pairs[i].place = (swap_u32)number(in);
    }
    for (size_t i = 0; i < n_segments; i++)
        segments[i].address = (uintptr_t)bytes(in, sizes[i], skew, &blocks[i]);
    sizes[n_segments] = n_rows * rows.row_bytes;
    rows.region = (uintptr_t)bytes(in, sizes[n_segments], 0, &blocks[n_segments]);

    nixl_tiers_swap(&rows, segments, n_segments, gaps, n_gaps, pairs, n_pairs, to_host, kernel);

    for (size_t i = 0; i <= n_segments; i++) {
        fwrite(blocks[i] + (i < n_segments ? skew : 0), 1, sizes[i], out);
        free(blocks[i]);
    }
    free(segments), free(sizes), free(blocks), free(gaps), free(pairs);
    fclose(in);
    return fclose(out) ? 1 : 0;
}
