/* A mover says which rows have arrived (mover/jobs.py), to the threads that copy streams (streams.c). */
#include "row_words.h"

/* Store ARRIVED for `n` rows whose bytes are in the region. */
void nixl_tiers_arrive(uint32_t *words, const uint32_t *rows, size_t n, uint32_t *bell) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* a release orders no streamed stores */
    for (size_t i = 0; i < n; i++)
        __atomic_store_n(&words[rows[i]], ARRIVED, __ATOMIC_RELEASE);
    ring(bell);
}
