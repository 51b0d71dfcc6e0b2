/* What swap_submit.c works with: the driver's functions, and the structures that Python declares too (swap/submit.py).
 *
 * The driver's functions come as pointers: nothing here links to CUDA. Their types are checked against NVIDIA's cuda.h
 * where a test defines SWAP_CUDA_H. All errors are CUresult; the name of the call that failed goes with them.
 */
#ifndef NIXL_TIERS_SWAP_SUBMIT_H
#define NIXL_TIERS_SWAP_SUBMIT_H

#include <stddef.h>
#include <stdint.h>

#include "swap.h"

#ifdef SWAP_CUDA_H
#include <cuda.h>
#else
enum { CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1, CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3 };
enum { CUDA_ERROR_NOT_READY = 600 };
enum { CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1 };
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUfunc_st *CUfunction;
typedef struct {
    unsigned type;
    int id;
} CUmemLocation;
typedef struct {
    unsigned srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned flags;
} CUmemcpyAttributes;
#endif

#define SUBMIT_ABI 5

/* BATCH: descriptors a call of the copy engine; a stream with about a thousand blocks its caller */
enum { SLOTS = 3, BATCH = 256, WARPS_OF_A_BLOCK = 8, THREADS = 256, CAPACITIES = 2 };
enum { COPY_ENGINE, STAGED }; /* swap_request.strategy */
enum { QUEUED, SUBMITTED, FAILED }; /* swap_request.state */

typedef struct {
    CUresult (*ctx_push)(CUcontext);
    CUresult (*ctx_pop)(CUcontext *);
    CUresult (*stream_wait_event)(CUstream, CUevent, unsigned);
    CUresult (*stream_synchronize)(CUstream);
    CUresult (*event_record)(CUevent, CUstream);
    CUresult (*event_synchronize)(CUevent);
    CUresult (*event_query)(CUevent);
    CUresult (*event_elapsed)(float *, CUevent, CUevent);
    CUresult (*memcpy_async)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
    CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                       void **, void **);
    /* as of CUDA 12.8, which cuGetProcAddress is asked for; NULL: copies go one by one */
    CUresult (*memcpy_batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t,
                             size_t *, CUstream);
} swap_driver;

/* One KV group: its segments and gaps on the host, and its tables on the GPU (see swap_job). */
typedef struct {
    const swap_segment *segments;
    const swap_gap *gaps;
    swap_u64 n_segments, n_gaps;
    swap_u64 parts, first_part;
    swap_u32 n_parts, n_tiles;
} swap_group;

/* What one direction's thread works with; constant while it runs. */
typedef struct {
    swap_driver driver;
    CUcontext context;
    CUstream work, copies;      /* kernels, and copies of the staged strategy */
    CUevent tail;               /* behind the last transfer */
    CUevent free[SLOTS], full[SLOTS];
    swap_rows rows;
    const swap_group *groups;
    swap_u64 staging, slot_pairs; /* SLOTS times slot_pairs sub-blocks on the GPU; 0: no staged strategy */
    swap_u64 zeros;               /* as many zero bytes on the GPU as the largest gap has */
    CUfunction stage[CAPACITIES];
    swap_u32 capacities[CAPACITIES];
    swap_u32 stage_blocks, to_host;
} swap_setup;

/* One transfer. The caller keeps it, and its pairs, until its state is not QUEUED any more. */
typedef struct swap_request {
    struct swap_request *next;
    const swap_pair *pairs;
    swap_u64 n_pairs;
    CUevent computed, begin, end;
    swap_u32 group, strategy;
    int state;
    CUresult code;
    const char *call; /* the one that failed with `code` */
} swap_request;

#endif
