"""Guards of the objective of a model that speaks: does it leak, does speech end where it should, which frame is learned."""
