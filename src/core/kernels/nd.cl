/* nd.cl - maps and reductions over strided tensors, and dropout. */
