"""How KV changes hands: handoffs and leases, reads, groups. Tensors and sockets: `transport`."""
