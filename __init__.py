"""HyperDFlash: lossless block speculative decoding for DeepSeek-V4."""
