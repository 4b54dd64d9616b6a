"""Training of drafters: blocks and anchors, and the loss."""
