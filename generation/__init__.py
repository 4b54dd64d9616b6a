"""Decoding from the command line, `generate` and `demo`; the native MTP module as an assistant; traces of rounds."""
