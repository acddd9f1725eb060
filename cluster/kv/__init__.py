"""How KV changes hands: tickets and leases, reads, groups. Tensors and sockets: `transport`."""
