"""`target.generate(custom_generate=<this repository>, trust_remote_code=True, assistant_model=drafter)`.

The same decoding as `target.generate(assistant_model=drafter)`. Loading the drafter is what teaches DeepSeek-V4
assisted decoding, so this file needs nothing but the drafter.
"""

# Arguments that say where this file comes from; transformers hands them on as if they were generate's own.
HUB_ARGUMENTS = ("revision", "cache_dir", "force_download", "local_files_only", "proxies", "repo_type", "token")


def generate(model, assistant_model=None, **kwargs):
    """Decode with a HyperDFlash drafter.

    Args:
        model: the target, whose `generate` was called.
        assistant_model: the drafter.
        kwargs: all other arguments of `generate`.

    Returns what `model.generate` returns. Raises `ValueError` when `assistant_model` is no HyperDFlash drafter.
    """
    if not hasattr(assistant_model, "assisted_decoding_loop"):
        given = "none" if assistant_model is None else type(assistant_model).__name__
        raise ValueError(
            f"this repository's generate needs a HyperDFlash drafter as assistant_model, got {given}: load one with "
            'drafter = AutoModel.from_pretrained("<this repository>", trust_remote_code=True) '
            "and pass assistant_model=drafter"
        )
    kwargs = {name: value for name, value in kwargs.items() if name not in HUB_ARGUMENTS}
    return model.generate(assistant_model=assistant_model, **kwargs)
