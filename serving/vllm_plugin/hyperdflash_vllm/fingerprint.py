"""Whether a target is the one that a drafter was made for. The plug-in for SGLang links this file."""

import torch


def check_fingerprint(drafter: dict, tensors: dict[str, torch.Tensor]) -> None:
    """These tensors of the target are those that the drafter was made with, up to bf16 rounding. Raises `ValueError`.

    The fingerprint is the root mean square and eight evenly spaced entries of each; the embedding's is left out, as it
    may be split over processes.
    """
    for name, tensor in tensors.items():
        expected = (drafter["target_fingerprint"] or {}).get(name)
        if expected is None:
            continue
        flat = tensor.detach().to("cpu", torch.bfloat16).float().flatten()
        # Engines load models with another default dtype than fp32, in which positions would be rounded
        picked = flat[torch.linspace(0, flat.numel() - 1, min(8, flat.numel()), dtype=torch.float32).long()]
        values = [float(flat.square().mean().sqrt()), *picked.tolist()]
        differ = len(values) != len(expected) or any(
            abs(a - b) > max(expected[0], 1e-6) / 64 for a, b in zip(values, expected, strict=True)
        )
        if differ:
            raise ValueError(
                f"the drafter was made for another target ({drafter['target_name_or_path']}): {name} differs (root "
                f"mean square {values[0]:.4g}, expected {expected[0]:.4g}); take that, or make another for this target"
            )
