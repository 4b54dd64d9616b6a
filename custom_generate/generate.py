def generate(model, assistant_model=None, **kwargs):
    """`target.generate(custom_generate=<this repository>, trust_remote_code=True, assistant_model=drafter)`.

    The same decoding as `target.generate(assistant_model=drafter)`. Loading the drafter is what teaches DeepSeek-V4
    assisted decoding, so that nothing is needed here but the drafter.

    Args:
        model: the target, whose `generate` was called.
        assistant_model: the drafter.
        kwargs: all other arguments of `generate`.

    Returns what `model.generate` returns. Raises `ValueError` when `assistant_model` is not a HyperDFlash drafter.
    """
    if not hasattr(assistant_model, "assisted_decoding_loop"):
        given = "none" if assistant_model is None else type(assistant_model).__name__
        raise ValueError(
            f"this repository's generate needs a HyperDFlash drafter as assistant_model, got {given}: load one with "
            'drafter = AutoModel.from_pretrained("<this repository>", trust_remote_code=True) '
            "and pass assistant_model=drafter"
        )
    # transformers hands on the arguments that say where this file comes from, as if they were generate's own
    hub = ("revision", "cache_dir", "force_download", "local_files_only", "proxies", "repo_type", "token")
    kwargs = {name: value for name, value in kwargs.items() if name not in hub}
    return model.generate(assistant_model=assistant_model, **kwargs)
