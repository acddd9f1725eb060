"""How KV changes hands: handoffs and leases, reads. Tensors and sockets: `transport`."""
