"""Training of drafters, in the order of a run: `data` (rows, their preview, answers from the target), `features` (the
target's residuals, stored), `train` (blocks, loss, transformers' Trainer), `export` (the Hub folder and its card)."""
