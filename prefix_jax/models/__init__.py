"""Model families: pure functions over arrays, written as Flax NNX modules."""
