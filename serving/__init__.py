"""Serving a drafter in inference engines: the folder that vLLM loads. `vllm_plugin/` is a distribution of its own."""
