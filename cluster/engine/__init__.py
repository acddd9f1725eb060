"""Pure state: sequences, blocks, the scheduler and the step. No tensors, no sockets."""
