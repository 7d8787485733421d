"""Suites on codecs: signal metrics, judges, bitrate and cost."""
