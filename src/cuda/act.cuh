/* act.cuh - the activations of the expert MLP in registers, for the epilogue of a product: the formulas of `activate`
   in core/kernels/common.clh with the hardware's exp2 and reciprocal, which err by less than 4u and 2u
   (u = 2^-24). */
#ifndef MOE_CUDA_ACT_CUH
#define MOE_CUDA_ACT_CUH

#include "cuda/ptx.cuh"

enum { ACT_IDENTITY = 1, ACT_RELU, ACT_RELU2, ACT_GELU, ACT_GELU_TANH, ACT_SILU }; /* enum moe__act_kind */

/* 1/(1 + exp(-slope*x)), given -slope*log2(e). */
PTX float sigmoid(float x, float slope)
{
  return reciprocal(1 + power_of_2(x * slope));
}

/* f(g) and f'(g) of 8 elements. */
PTX void activate(const float (&g)[8], int kind, float alpha, float (&f)[8], float (&df)[8])
{
  const float log2e = 1.44269504088896340736f;
  if (kind == ACT_SILU) {
    const float slope = alpha * -log2e;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float s = sigmoid(g[j], slope);
      f[j] = g[j] * s;
      df[j] = s + alpha * f[j] * (1 - s);
    }
  } else if (kind == ACT_IDENTITY) {
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = g[j], df[j] = 1;
  } else if (kind == ACT_RELU) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      f[j] = g[j] < 0 ? 0 : g[j];
      df[j] = g[j] > 0 ? 1 : g[j] <= 0 ? 0 : g[j];
    }
  } else if (kind == ACT_RELU2) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float relu = g[j] < 0 ? 0 : g[j];
      f[j] = relu * relu;
      df[j] = 2 * relu;
    }
  } else if (kind == ACT_GELU) { /* g P, P + g exp(-g^2/2)/sqrt(2 pi); see normal_cdf */
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float e = power_of_2(g[j] * g[j] * (-0.5f * log2e)), t = reciprocal(1 + 0.3f * fabsf(g[j]));
      float w = -0.020623374441f;
      w = w * t + 0.11243510458f;
      w = w * t + -0.22821242228f;
      w = w * t + 0.19178299814f;
      w = w * t + -0.079422250726f;
      w = w * t + 0.096156192508f;
      w = w * t + 0.078389859816f;
      w = w * t + 0.11023538249f;
      w = w * t + 0.11957181858f;
      w = w * t + 0.11968668959f;
      w *= t * e;
      const float p = g[j] > 0 ? 1 - w : w;
      f[j] = g[j] * p;
      df[j] = p + g[j] * e * 0.39894228040143267794f;
    }
  } else if (kind == ACT_GELU_TANH) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float q = g[j] + 0.044715f * g[j] * g[j] * g[j];
      const float s = sigmoid(q, 1.59576912160573071176f * -log2e), t = s * (1 - s);
      const float slope = 1.59576912160573071176f * (1 + 0.134145f * g[j] * g[j]);
      f[j] = g[j] * s;
      df[j] = s + (t == 0 ? 0 : g[j] * t * slope); /* slope may be infinite there */
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      f[j] = sigmoid(g[j], -log2e);
      df[j] = f[j] * (1 - f[j]);
    }
  }
}

/* 8 elements in 16 bytes. */
template <bool half> PTX void unpack_8(float (&v)[8], uint4 from)
{
  const uint32_t words[4] = { from.x, from.y, from.z, from.w };
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 two = unpack<half>(words[i]);
    v[2 * i] = two.x;
    v[2 * i + 1] = two.y;
  }
}
template <bool half> PTX uint4 pack_8(const float (&v)[8])
{
  return make_uint4(pack<half>(v[0], v[1]), pack<half>(v[2], v[3]), pack<half>(v[4], v[5]), pack<half>(v[6], v[7]));
}

#endif
