/* nd.c - reference of the maps and reductions over tensors of any shape, and of dropout. */
#include "ref.h"

static num activation(int64_t kind, num a)
{
  return ref_activation((struct moe__act){ .kind = kind }, a);
}

static num map(int64_t op, num a, num b, num c, double alpha)
{
  switch (op) {
  case MOE__ND_COPY: return ref_real(alpha) == 1 ? a : n_mul(n_real(alpha), a);
  case MOE__ND_ADD: return n_add(a, b);
  case MOE__ND_SUB: return n_sub(a, b);
  case MOE__ND_MUL: return n_mul(a, b);
  case MOE__ND_DIV: return n_div(a, b);
  case MOE__ND_MAX: return n_max(a, b);
  case MOE__ND_GREATER: return n_exact(a.v > b.v);
  case MOE__ND_EQUAL: return n_exact(a.v == b.v);
  case MOE__ND_WHERE: return a.v != 0 ? b : c;
  case MOE__ND_POW: return n_pow(a, n_real(alpha));
  case MOE__ND_EXP: return n_exp(a);
  case MOE__ND_LOG: return n_log(a);
  case MOE__ND_SQRT: return n_sqrt(a);
  case MOE__ND_TANH: return n_tanh(a);
  case MOE__ND_ERF: return n_erf(a);
  case MOE__ND_RELU: return activation(MOE__ACT_RELU, a);
  case MOE__ND_SIGMOID: return activation(MOE__ACT_SIGMOID, a);
  case MOE__ND_SILU: return activation(MOE__ACT_SILU, a);
  case MOE__ND_GELU: return activation(MOE__ACT_GELU, a);
  default: return activation(MOE__ACT_GELU_TANH, a);
  }
}

void ref_nd_map(num *y, const num *a, const num *b, const num *c, int64_t op, int64_t n, int64_t accumulate,
                double alpha)
{
  for (int64_t i = 0; i < n; i++) {
    num v = map(op, a[i], b ? b[i] : n_exact(0), c ? c[i] : n_exact(0), alpha);
    y[i] = accumulate ? n_add(y[i], v) : v;
  }
}

/* Element r of those that go into output o, which is a number in the dimensions that `axes` leaves. */
static int64_t element_of(int64_t o, int64_t r, int64_t axes, int64_t rank, const int64_t *shape)
{
  int64_t at = 0, stride = 1;
  for (int64_t d = rank - 1; d >= 0; stride *= shape[d--]) {
    int64_t *number = axes >> d & 1 ? &r : &o;
    at += *number % shape[d] * stride;
    *number /= shape[d];
  }
  return at;
}

void ref_nd_reduce(num *y, const num *a, int64_t op, int64_t axes, int64_t rank, const int64_t *shape,
                   int64_t accumulate, double alpha)
{
  int64_t terms = 1, outputs = 1;
  for (int64_t d = 0; d < rank; d++) *(axes >> d & 1 ? &terms : &outputs) *= shape[d];
  for (int64_t o = 0; o < outputs; o++) {
    struct sum s = { 0 };
    num v = n_exact(-INFINITY);
    for (int64_t r = 0; r < terms; r++) {
      num term = a[element_of(o, r, axes, rank, shape)];
      sum_add(&s, term);
      v = n_max(v, term);
    }
    if (op == MOE__ND_SUM) v = sum_end(&s);
    if (alpha != 1) v = n_mul(n_real(alpha), v);
    y[o] = accumulate ? n_add(y[o], v) : v;
  }
}

/* Known to the bit: an integer comparison, and one product that is correctly rounded. */
void ref_nd_dropout_at(num *y, const num *a, int64_t first, int64_t n, int64_t seed, int64_t stream, int64_t step,
                       double p)
{
  double scale = ref_real(1 / (1 - p));
  for (int64_t i = 0; i < n; i++) {
    uint64_t at = (uint64_t)(first + i), key = (uint64_t)seed + 0x9E3779B97F4A7C15u * (uint64_t)step;
    uint32_t words[4];
    ref_philox(words, at / 4, (uint64_t)stream, key);
    y[i] = n_exact(words[at % 4] >= rint(p * 0x1p32) ? ref_real(a[i].v * scale) : 0);
  }
}
