/* layer.h - the reference of a whole layer: the ops of ref.h in the order of doc/math.md, with bounds that grow by
   one rounding wherever the library stores an intermediate array in a 16-bit type. */
#ifndef MOE_REF_LAYER_H
#define MOE_REF_LAYER_H

#include "device.h"

/* The layer's parameters, in its order. */
enum ref_param {
  REF_ROUTER,
  REF_ROUTER_BIAS,
  REF_CORRECTION_BIAS,
  REF_GATE,
  REF_UP,
  REF_DOWN,
  REF_GATE_BIAS,
  REF_UP_BIAS,
  REF_DOWN_BIAS,
  REF_SHARED_GATE_PROJ,
  REF_SHARED_UP,
  REF_SHARED_DOWN,
  REF_SHARED_GATE,
  REF_PARAMS
};
extern const char *const ref_param_names[REF_PARAMS]; /* as moe_layer_param names them */

/* Inputs, then what the functions fill in (arrays of the t_memory).  An absent parameter is NULL.  Without a router
   `logits` are given, and dx is without the router's part: the routed branch alone. */
struct ref_layer {
  int64_t T, D, F, E, K, Fs, S, dtype; /* Fs: width of the shared expert; dtype: of storage */
  struct moe__weigh weigh;
  struct moe__act act;
  int64_t balance_scoring;
  double balance_coef, z_coef;
  const num *x, *dy, *mask, *aux_scale, *p[REF_PARAMS];
  const int32_t *ids;

  const num *logits;
  num *weights, *y, *losses, *dx, *dlogits, *d[REF_PARAMS];
  int32_t *counts;
  /* Kept by forward for backward. */
  num *h, *hs, *z, *sg;
  int32_t *offs, *row2slot, *slot2row, *tokens, health;
};
void ref_layer_forward(struct ref_layer *l, struct t_memory *m);
void ref_layer_backward(struct ref_layer *l, struct t_memory *m);

#endif
