/* nd.c - reference of the maps and reductions over strided tensors. */
#include "ref.h"
