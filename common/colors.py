"""The colours of all pictures: a method has the same one wherever it is drawn.

Okabe and Ito's colours and some of Tol's, which colour-blind eyes tell apart.
"""

import re

BLUE, SKY, GREEN, ORANGE, VERMILION, PINK = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
GREY, WINE, INDIGO, OLIVE, SAND, TEAL = "#7f7f7f", "#882255", "#332288", "#999933", "#ddcc77", "#44aa99"
TRAINED_MTP = "mtp, another checkpoint"
OF_METHODS = {
    "hyperdflash": BLUE,
    "mean": SKY,
    "fc": ORANGE,
    "dflash": GREY,
    "hyperdflash+markov": GREEN,
    "hyperdflash+markov+confidence": INDIGO,
    "mean+markov": SAND,
    "dspark-like": PINK,
    "dspark": TEAL,
    "mtp": WINE,
    TRAINED_MTP: VERMILION,
    "prompt-lookup": OLIVE,
}
MARKERS = "osD^vPX*<>"  # for prints without colour


def method_styles(labels: list[str]) -> dict[str, dict]:
    """Colour and marker of each method of a picture.

    Methods that differ in drafts or checkpoint only are shades of one colour, the one with the most drafts in full.

    Args:
        labels: `name:N`, or `name:N (checkpoints)`, as in the results of a benchmark.
    """
    styles, shades = {}, {}
    for label in sorted(labels, key=lambda label: -_num_drafts(label)):  # stable: else in the order of the labels
        name = _name(label)
        shade = shades[name] = shades.get(name, -1) + 1
        color = _lighter(OF_METHODS.get(name, "#000000"), min(0.35 * shade, 0.7))
        styles[label] = {"color": color, "marker": MARKERS[labels.index(label) % len(MARKERS)]}
    return {label: styles[label] for label in labels}


def _name(label: str) -> str:
    name, _, rest = label.partition(":")
    is_trained = name == "mtp" and "(" in rest and "(the target" not in rest
    return TRAINED_MTP if is_trained else name


def _num_drafts(label: str) -> int:
    number = re.search(r":(\d+)", label)
    return int(number[1]) if number else 0


def _lighter(color: str, share: float) -> str:
    """The colour mixed with a share of white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
