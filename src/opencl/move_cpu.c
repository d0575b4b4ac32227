/* move_cpu.c - launches the kernels of move_cpu.cl. */
#include "opencl/impls.h"

static moe_status can_combine(const struct moe__dev_info *info, const struct moe__args_combine *args,
                              struct moe__why *why)
{
  if (moe__cl_on_cpu(info, why)) return MOE_ERR_UNSUPPORTED;
  if (args->D > 1 && (args->y.stride[1] != 1 || args->rows.stride[1] != 1))
    return moe__cannot(why, "wants packed rows, got strides %lld and %lld", (long long)args->y.stride[1],
                       (long long)args->rows.stride[1]);
  if (args->D > 1 && args->add.handle && args->add.stride[1] != 1)
    return moe__cannot(why, "wants packed rows of add, got stride %lld", (long long)args->add.stride[1]);
  return MOE_OK;
}

static moe_status run_combine(moe_queue *q, const struct moe__args_combine *args)
{
  static const struct moe__kernel K = { "move_cpu", "combine_rows" };
  if (args->T == 0 || args->D == 0) return MOE_OK;
  return LAUNCH(q, &K, args->dtype, moe__cl_groups(q), 1, 1, 1, T_(args->y), L_(args->y.stride[0]), T_(args->rows),
                L_(args->rows.stride[0]), T_(args->weights), T_(args->slot2row), T_(args->add), L_(args->add.stride[0]),
                L_(args->T), L_(args->K), L_(args->D), I_(args->unweighted));
}

const struct moe__impl_combine moe__cl_combine[] = { { "combine:cpu", "move_cpu", 0, can_combine, run_combine },
                                                     { 0 } };
