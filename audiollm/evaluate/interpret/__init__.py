"""Simultaneous interpretation: latency from the times at which units came out, and the quality of the output."""
