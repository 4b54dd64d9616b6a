"""Decoding from the command line, `generate` and `demo`; DeepSeek's own drafters as assistants; traces of rounds."""
