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

#endif
