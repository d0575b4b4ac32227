/* safetensors.h - the format's header, in memory. */
#ifndef MOE_CORE_SAFETENSORS_H
#define MOE_CORE_SAFETENSORS_H

#include <moe/checkpoint.h>

#endif
