/* hash.h - XXH3, 64 bits, of a block of memory or of its pieces in turn; xxHash's header brings the code along. */
#ifndef MOE_CORE_HASH_H
#define MOE_CORE_HASH_H

#define XXH_INLINE_ALL
#include <xxhash.h>

static inline uint64_t moe__hash(const void *data, uint64_t bytes)
{
  return XXH3_64bits(data, (size_t)bytes);
}

#endif
