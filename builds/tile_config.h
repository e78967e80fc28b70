/* Included ahead of every C++ file of ggml (`tile_config.cmake`).
 *
 * GCC's `_tile_loadconfig` names 8 bytes as the input of `ldtilecfg`, which reads 64. From GCC 12 on
 * the optimiser removes the stores to the other 56, and the first AMX instruction of the
 * sapphirerapids variant ends the process with SIGILL. This one names all 64.
 */
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

static inline __attribute__((always_inline)) void llorch_tile_loadconfig(const void * config) {
    __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64]) config));
}

#define _tile_loadconfig llorch_tile_loadconfig
#endif
