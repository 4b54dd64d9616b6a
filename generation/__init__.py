"""Decoding tools outside the closure: the native MTP module, the benchmark and the command line."""
