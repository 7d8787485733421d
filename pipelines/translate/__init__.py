"""The stage `translate`: translations of segments, and which words of the source each of their words needs."""
