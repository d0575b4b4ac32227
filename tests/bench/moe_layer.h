/* moe_layer.h - the parts of the layer's benchmark: the routed branch beside its bound (branch.c), and single
   operations beside the copy bandwidth (ops.c).  T tokens, D model width, F expert width, E experts, K chosen,
   R = T*K rows. */
#ifndef MOE_BENCH_LAYER_H
#define MOE_BENCH_LAYER_H

#include "bench.h"

struct shape {
  const char *name;
  int64_t T, D, F, E, K;
  int target; /* measured where none is asked for */
};

/* What the device was found to do, in this run. */
struct peaks {
  double bytes; /* a second, read and written, of a large copy */
  double flops; /* a second, of a dense cuBLAS product in the bench's dtype; 0: there is no cuBLAS */
};
extern struct peaks peaks;
void measure_peaks(int64_t dtype);

/* ---- branch.c ---------------------------------------------------------------------------------------------------- */
enum { MOST_FIGURES = 6, MOST_STEPS = 40 };
struct figure {
  const char *what;
  double flops;        /* useful: 6*R*D*F forward, twice that backward */
  double floor_ms;     /* 0: no peak is known */
  struct spread ms;    /* forward: from the end of the plan */
  struct spread whole; /* forward: with selection, weights and plan; backward: as ms */
  struct spread bound; /* median 0: there is no cuBLAS */
};
struct step {
  const char *label;
  char impl[48];
  double ms;
};
struct result {
  int64_t fewest, most; /* rows of an expert */
  double kept, scratch; /* bytes; kept: saved and the logits */
  double mhz, watts;
  struct figure figures[MOST_FIGURES];
  struct step steps[MOST_STEPS];
  int n_figures, n_steps;
  char *explain; /* free it */
};

struct branch;
/* NULL where memory does not suffice (moe_last_error says by how much). */
struct branch *branch_open(const struct shape *shape, int64_t dtype, int64_t strategy);
/* Draws logits: each expert alike, or with odds 1, 1/2, 1/3, ... */
void branch_route(struct branch *branch, int zipf);
void branch_measure(struct branch *branch, int graph, struct result *result);
void branch_close(struct branch *branch);

/* ---- ops.c ------------------------------------------------------------------------------------------------------- */
struct op_figure {
  const char *op, *impl;
  double bytes; /* that every implementation must read or write */
  double flops; /* of a product */
  struct spread ms;
};
enum { MOST_OPS = 16, MOST_PARAMETERS = 1 << 27 /* of AdamW and the norm over them */ };
/* Returns how many there are. */
int measure_ops(struct op_figure figures[MOST_OPS], const struct shape *shape, int64_t dtype);
/* The six products of the branch by each implementation on matrix units. */
enum { MOST_PRODUCTS = 24 };
int measure_products(struct op_figure figures[MOST_PRODUCTS], const struct shape *shape, int64_t dtype);

#endif
