/* Row words and the doorbell, which processes share (nixl_tiers/base/row_words.py). */
#ifndef NIXL_TIERS_ROW_WORDS_H
#define NIXL_TIERS_ROW_WORDS_H

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ARRIVED = 2 };

/* Wakes whoever waits for the bell, in any process. */
static inline void ring(uint32_t *bell) {
    __atomic_fetch_add(bell, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

#endif
