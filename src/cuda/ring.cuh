/* ring.cuh - what the Hopper kernels share of their rings of stages: the position in one, what travels with a stage (a
   tile's place, 16 bytes in shared memory), and how warps that multiply give one back. */
#ifndef MOE_CUDA_RING_CUH
#define MOE_CUDA_RING_CUH

#include "cuda/ptx.cuh"

template <int stages> struct ring_of {
  int stage, parity;
  __device__ __forceinline__ void next()
  {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

/* A place of four words, for all lanes.  Lane 0 reads it, the one that gives the stage back: its read is over before its
   arrival is seen. */
template <class place> PTX place read_place(const unsigned char *from, int lane)
{
  int4 words = { 0, 0, 0, 0 };
  if (lane == 0) words = *(const int4 *)from;
  return { __shfl_sync(~0u, words.x, 0), __shfl_sync(~0u, words.y, 0), __shfl_sync(~0u, words.z, 0),
           __shfl_sync(~0u, words.w, 0) };
}

/* Gives a stage back, in a cluster to both blocks, whose copies fill both: lane 0 its own, lane 1 the other's. */
template <int blocks> PTX void give_back(uint32_t empty, int lane)
{
  if (blocks == 1 && lane == 0) barrier_arrive(empty);
  if (blocks > 1 && lane < blocks) barrier_arrive_at(empty, block_of_cluster() ^ lane);
}

#endif
