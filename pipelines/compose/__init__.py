"""The stage `compose`: segments to samples."""
