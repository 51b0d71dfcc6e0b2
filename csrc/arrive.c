/* A mover says which rows have arrived (mover/jobs.py), to the threads that copy streams (streams.c). */
#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ARRIVED = 2 }; /* as in base/row_words.py */

/* Store ARRIVED for `n` rows whose bytes are in the region, and wake whoever waits for `bell`. */
void nixl_tiers_arrive(uint32_t *words, const uint32_t *rows, size_t n, uint32_t *bell) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* a release orders no streamed stores */
    for (size_t i = 0; i < n; i++)
        __atomic_store_n(&words[rows[i]], ARRIVED, __ATOMIC_RELEASE);
    __atomic_fetch_add(bell, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
