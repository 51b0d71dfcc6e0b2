/* Index arithmetic of the swap between engine blocks and region rows: the one place that knows where a byte stands.
 *
 * Included by the CPU path (C), by CUDA C++ through nvcc, and by NVRTC, which has no standard headers.
 * Nothing here touches memory: every function turns numbers into numbers.
 */
#ifndef NIXL_TIERS_SWAP_H
#define NIXL_TIERS_SWAP_H

#ifdef __CUDACC_RTC__
typedef unsigned int swap_u32;
typedef unsigned long long swap_u64;
#else
#include <stdint.h>
typedef uint32_t swap_u32;
typedef uint64_t swap_u64;
#endif

#ifdef __CUDACC__
#define SWAP_FN static __host__ __device__ __forceinline__
#else
#define SWAP_FN static inline
#endif

/* One layer's page: block b stands at address + b * block_stride, and at `offset` inside a sub-block of the cell. */
typedef struct {
    swap_u64 address;
    swap_u64 block_stride;
    swap_u64 nbytes;
    swap_u64 offset;
} swap_segment;

/* Bytes of a sub-block that no segment of the group covers: a store zeroes them. */
typedef struct {
    swap_u64 offset;
    swap_u64 nbytes;
} swap_gap;

/* This rank's cell in every row of the region; all in bytes but sub_blocks. */
typedef struct {
    swap_u64 region;
    swap_u64 row_bytes;
    swap_u64 cell_offset;
    swap_u64 sub_block_bytes;
    swap_u64 sub_blocks;
} swap_rows;

/* What one transfer sends per block: which engine block, and which place = row * sub_blocks + sub-block. */
typedef struct {
    swap_u32 block;
    swap_u32 place;
} swap_pair;

/* A kernel looks at a sub-block as tiles, and at each tile as the pieces of the parts that reach into it. A group's parts
 * are its segments and its gaps (address 0) by offset: together they cover a sub-block exactly. */
enum { SWAP_TILE = 2048 };

/* What stays the same for every pair of one launch. `parts` and `first_part` are device addresses of the group's tables
 * (first_part[t]: the first part that reaches into tile t); `staging` holds one sub-block per pair, side by side. */
typedef struct {
    swap_rows rows;
    swap_u64 parts;
    swap_u64 first_part;
    swap_u64 staging;
    swap_u32 n_parts;
    swap_u32 n_tiles;
    swap_u32 n_pairs;
    swap_u32 to_host;
} swap_job;

/* Address of a place's sub-block in the region. */
SWAP_FN swap_u64 swap_place_address(const swap_rows *rows, swap_u32 place) {
    swap_u32 sub_blocks = (swap_u32)rows->sub_blocks;
    swap_u32 row = place / sub_blocks;
    swap_u32 sub = place - row * sub_blocks;
    return rows->region + row * rows->row_bytes + rows->cell_offset + sub * rows->sub_block_bytes;
}

/* Address of a block's page in the engine's memory. */
SWAP_FN swap_u64 swap_page_address(const swap_segment *segment, swap_u32 block) {
    return segment->address + block * segment->block_stride;
}

/* Part of a sub-block that lies in one part and one tile: `nbytes` from `offset` on, 0 if the two do not meet. */
SWAP_FN swap_gap swap_piece(const swap_segment *part, swap_u32 tile) {
    swap_u64 tile_begin = (swap_u64)tile * SWAP_TILE, tile_end = tile_begin + SWAP_TILE;
    swap_u64 part_end = part->offset + part->nbytes;
    swap_u64 begin = part->offset > tile_begin ? part->offset : tile_begin;
    swap_u64 end = part_end < tile_end ? part_end : tile_end;
    swap_gap piece = {begin, end > begin ? end - begin : 0};
    return piece;
}

/* Address in the engine's memory of the byte that stands at `offset` of a sub-block, inside `part` (no gap). */
SWAP_FN swap_u64 swap_engine_address(const swap_segment *part, swap_u32 block, swap_u64 offset) {
    return swap_page_address(part, block) + (offset - part->offset);
}

#endif
