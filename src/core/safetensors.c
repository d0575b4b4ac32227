/* safetensors.c - a skeleton. */
#include "core/safetensors.h"
