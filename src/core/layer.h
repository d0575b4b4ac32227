/* layer.h - what checkpoints need to know of the layer's parameters beyond moe_layer_param. */
#ifndef MOE_CORE_LAYER_H
#define MOE_CORE_LAYER_H

#include <moe/layer.h>

/* The dimensions of the parameter with this name, slowest first: "EFD" of E experts, F their width, D the model's
   width, S the shared expert's width, 1.  NULL: there is none such. */
const char *moe__param_dims(const char *name);
/* Fails where the queue is of another context than the layer. */
moe_status moe__layer_check(const char *fn, const moe_layer *l, const moe_queue *q);

#endif
