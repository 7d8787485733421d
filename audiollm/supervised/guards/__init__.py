"""Guards of the objective of a model that speaks: does it leak, does speech end, which frame is learned."""
