"""Serving a drafter in inference engines: the folders that vLLM and SGLang load. The plug-ins are distributions of their own."""
