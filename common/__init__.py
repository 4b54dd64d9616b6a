"""What generation, training and the benchmark stand on: checkpoints, data files, written files, the console."""
