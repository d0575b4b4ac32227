/* ggemm_sm90.h - what the Hopper kernels of the ragged products and their launchers share. */
#ifndef MOE_CUDA_GGEMM_SM90_H
#define MOE_CUDA_GGEMM_SM90_H

#include <cuda.h>
#include <stdint.h>

enum {
  MOE__SM90_EXPERTS = 1024, /* at most */
  MOE__SM90_SLOTS = 65536   /* see moe__cuda_slot */
};

/* Arguments of rows_sm90.cu.  Every count is of one half where split. */
struct moe__sm90_act {
  int32_t kind, gated;
  float alpha, limit, up_offset; /* limit: infinite for none */
};
struct moe__sm90_rows {
  CUtensorMap a[2], b[2], c[2]; /* a by half of K, b by half of either, c by half of N */
  CUtensorMap h[2];             /* of the gradient's epilogue: gate (or all) and up */
  const int32_t *offs, *map;
  const unsigned char *x; /* a where map is given */
  int64_t x_stride;       /* bytes */
  unsigned char *y;       /* c; PLAIN only */
  int64_t y_stride;
  const unsigned char *bias[2];
  int64_t bias_stride[2];
  int64_t div_mul;
  int32_t div_shift, E, N, K, split;
  int32_t slot; /* of the counter that tiles are drawn from; -1: no counter */
  /* Of ACT_GRAD; rows so many bytes apart. */
  struct moe__sm90_act act;
  unsigned char *dh, *aw, *parts; /* parts: FP32, by column tile; opt but dh */
  int64_t dh_stride, aw_stride, parts_stride;
  const float *weights; /* by slot; NULL: 1 */
};

/* Arguments of `sums`: sums[map(r)] (+)= the sum of n parts of row r. */
struct moe__sm90_sums {
  const unsigned char *parts;
  int64_t stride; /* bytes */
  const int32_t *offs, *map;
  float *sums;
  int32_t E, n, accumulate;
};

/* Arguments of wgrad_sm90.cu.  M and N are of one half where split, in either direction. */
struct moe__sm90_rows_of {
  CUtensorMap tensor; /* where there is no map */
  const unsigned char *x;
  uint32_t stride; /* bytes, where there is one */
  const int32_t *map;
  int64_t div_mul;
  int32_t div_shift, columns; /* columns: of both halves */
};
struct moe__sm90_wgrad {
  CUtensorMap c[2];
  struct moe__sm90_rows_of p, q; /* where one has a map, it is p */
  const int32_t *offs;
  const unsigned char *y[2];              /* c */
  int64_t y_stride[2][3];                 /* bytes, of e, m, n */
  int32_t R, E, M, N, accumulate, turned; /* turned: c's contiguous dimension is m */
  int32_t m_tiles, n_tiles;               /* of M and N, m_tiles even */
  int32_t pairs, columns;                 /* pairs of tiles along m, tiles along n, of both halves */
};

/* A kernel, and the shared memory that its launches name. */
struct moe__sm90_kernel {
  const void *function;
  int32_t threads, shared;
};
#ifdef __cplusplus
extern "C" {
#endif
/* [clusters of 2 blocks][f16][gathered][B by N]. */
extern const struct moe__sm90_kernel moe__sm90_rows_kernels[2][2][2][2];
/* With the gradient of an activation: [clusters of 2 blocks][f16][B by N]; a is gathered. */
extern const struct moe__sm90_kernel moe__sm90_act_grad_kernels[2][2][2];
extern const struct moe__sm90_kernel moe__sm90_sums_kernel;
/* [f16][c in FP32]. */
extern const struct moe__sm90_kernel moe__sm90_wgrad_kernels[2][2];
#ifdef __cplusplus
}
#endif

#endif
